"""The OpenAI-compatible HTTP interface; everything that is text happens here."""
