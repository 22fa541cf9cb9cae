"""Tensor parallelism: collectives on tensors and the modules that `tp` cuts."""
