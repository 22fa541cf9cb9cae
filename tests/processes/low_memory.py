"""A program in which one process may allocate only a little memory after its start."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

from actors.runtime.program import Groups
from pipelines.run.program import TrainingProgram
from pipelines.training.replica.replica import ShardedReplica

HEADROOM_BYTES = 24 << 20


class LowMemoryProgram(TrainingProgram):
    """Real allocations fail once the process has mapped `HEADROOM_BYTES` more."""

    def __init__(self, settings: dict[str, Any], data_folder: str | None = None) -> None:
        super().__init__(settings, data_folder, device="cpu")

    def build(self, groups: Groups) -> ShardedReplica:
        replica = super().build(groups)
        if groups.world_rank == groups.layout.num_workers - 1:
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            limit_bytes = pages * resource.getpagesize() + HEADROOM_BYTES
            resource.setrlimit(resource.RLIMIT_AS, (limit_bytes, resource.RLIM_INFINITY))
        return replica
