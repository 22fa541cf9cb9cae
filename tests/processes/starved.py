"""A program whose process may not have more memory than a little over what its start took."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

from actors.runtime.program import Groups
from pipelines.run.program import TrainingProgram
from pipelines.training.replica.replica import ShardedReplica

LEFT_BYTES = 24 << 20


class StarvedProgram(TrainingProgram):
    """Real allocations fail once the process has mapped so much more."""

    def __init__(self, settings: dict[str, Any], data_folder: str | None = None) -> None:
        super().__init__(settings, data_folder, device="cpu")

    def build(self, groups: Groups) -> ShardedReplica:
        replica = super().build(groups)
        if groups.world_rank == groups.layout.num_workers - 1:
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            bound = pages * resource.getpagesize() + LEFT_BYTES
            resource.setrlimit(resource.RLIMIT_AS, (bound, resource.RLIM_INFINITY))
        return replica
