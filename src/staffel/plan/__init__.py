"""How many instances of which phase, with which parallelism, and whether to disaggregate."""
