"""A training program whose workers build another kind of replica."""

from __future__ import annotations

from actors.runtime.program import Groups
from pipelines.run.program import TrainingProgram
from pipelines.training.replica.replica import ShardedReplica


def program_with(replica: type[ShardedReplica]) -> type[TrainingProgram]:
    class Program(TrainingProgram):
        def build(self, groups: Groups) -> ShardedReplica:
            return replica(self.workload, self.settings, groups)

    return Program
