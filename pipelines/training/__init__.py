"""Training of a model: modules, parallelism, optimizer, replica, checkpoint shards.

`replica.replica` computes and applies a step. `workload.workload` is the interface that a new kind
of model implements.
"""
