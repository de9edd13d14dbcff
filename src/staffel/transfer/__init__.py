"""Moving KV blocks from one instance's memory to another's."""
