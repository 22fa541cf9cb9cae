"""Tensor parallelism: collectives on plain tensors, and the modules that `tp` shards."""
