"""The tensors: loading, paged KV cache, attention, sampling, and the executor of batches."""
