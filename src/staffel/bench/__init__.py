"""Measuring goodput of any endpoint that speaks the OpenAI API. Stands apart from `model`."""
