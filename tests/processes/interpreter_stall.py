"""A program in which C code on one rank holds the interpreter lock, as a tokenizer may."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from replica_program import program_with
from torch import Tensor

from actors.runtime.program import Interrupt
from pipelines.training.replica.replica import ShardedReplica

STALLED_RANK, STALLED_STEPS, STALL_S = 1, (9, 12, 15), 3


class Stalled(ShardedReplica):
    def compute(
        self, step: int, interrupt: Interrupt, skipped_batches: Sequence[int] = ()
    ) -> Tensor:
        if step in STALLED_STEPS and self.groups.world_rank == STALLED_RANK:
            ctypes.PyDLL(None).sleep(STALL_S)
        return super().compute(step, interrupt, skipped_batches)


StalledProgram = program_with(Stalled)
