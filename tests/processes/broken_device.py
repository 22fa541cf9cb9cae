"""A program in which the device of one worker breaks, as NCCL reports it, and stays broken."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist
from replica_program import program_with
from torch import Tensor

from actors.runtime.program import Interrupt
from pipelines.training.replica.replica import ShardedReplica

FATAL_STEP = 9
BROKEN_RANK, FAILING_RANK = 1, 2
LATE_S = 0.7
MARK = "BROKEN_DEVICE_FILE"
"""Environment variable: the file with the process id of the worker whose device is broken."""
TEXT = (
    "NCCL error in: ProcessGroupNCCL.cpp:3699, unhandled cuda error (run with NCCL_DEBUG=INFO for "
    "details), NCCL version 2.27.3\nncclUnhandledCudaError: Call to CUDA function failed.\n"
    "Last error:\nCuda failure 'uncorrectable ECC error encountered'"
)


class BrokenDevice(ShardedReplica):
    is_late = False
    """Whether a peer raises first, so that this worker raises only after the abort."""

    def compute(
        self, step: int, interrupt: Interrupt, skipped_batches: Sequence[int] = ()
    ) -> Tensor:
        world_rank, mark = self.groups.world_rank, Path(os.environ[MARK])
        if step == FATAL_STEP and world_rank == BROKEN_RANK and not mark.exists():
            mark.write_text(str(os.getpid()))
        if mark.exists() and mark.read_text() == str(os.getpid()):
            time.sleep(LATE_S if self.is_late else 0.0)
            raise dist.DistBackendError(TEXT)
        if step == FATAL_STEP and world_rank == FAILING_RANK and self.is_late and mark.exists():
            raise dist.DistBackendError("gloo: Connection closed by peer [127.0.0.1]:40961")
        return super().compute(step, interrupt, skipped_batches)


class LateBrokenDevice(BrokenDevice):
    is_late = True


raises_first = program_with(BrokenDevice)
raises_late = program_with(LateBrokenDevice)
