"""Decisions: pure state machines that take events and the time, and return commands."""
