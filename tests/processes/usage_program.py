"""A program that records the resources of its process at each build."""

from __future__ import annotations

import json
import os
import threading
import weakref
from pathlib import Path
from typing import Any

import psutil
import torch

from actors.runtime.program import Groups
from pipelines.run.program import TrainingProgram
from pipelines.training.replica.replica import ShardedReplica


class UsageProgram(TrainingProgram):
    """Appends one line to `<folder>/usage-<pid>.jsonl` before each build."""

    def __init__(self, settings: dict[str, Any], data_folder: str | None = None) -> None:
        super().__init__(settings, data_folder)
        self.folder = Path(os.environ["USAGE_FOLDER"])
        self.modules = weakref.WeakSet[torch.nn.Module]()

    def build(self, groups: Groups) -> ShardedReplica:
        process = psutil.Process()
        usage = {
            "generation": groups.assignment.generation,
            "world_size": groups.assignment.layout.num_workers,
            "num_fds": process.num_fds(),
            "num_threads": process.num_threads(),
            "num_python_threads": threading.active_count(),
            "memory_bytes": process.memory_info().rss,
            "num_modules": len(self.modules),
        }
        with open(self.folder / f"usage-{os.getpid()}.jsonl", "a") as out:
            out.write(json.dumps(usage) + "\n")
        replica = super().build(groups)
        for module in replica.sharded.modules:
            self.modules.update(module.modules())
        return replica
