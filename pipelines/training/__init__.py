"""Models and how they are trained: modules, sharding, optimizer, replicas, checkpoint parts.

`replica` is where a step happens; `workload` is what a new kind of model has to provide.
"""

from pipelines.training.replica.replica import ShardedReplica
from pipelines.training.workload.workload import Workload

__all__ = ["ShardedReplica", "Workload"]
