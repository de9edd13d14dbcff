"""Staffel serves large language models with prefill and decode on separate workers."""

__version__ = "0.1.0"
