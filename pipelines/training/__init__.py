"""Training of a model: modules, parallelism, optimizer, replica, checkpoint shards.

`replica` computes and applies a step. `workload` is the interface that a new kind of model
implements.
"""

from pipelines.training.replica.replica import ShardedReplica
from pipelines.training.workload.workload import Workload

__all__ = ["ShardedReplica", "Workload"]
