"""A program in which one worker raises within a step, and the other unwinds at once or slowly."""

from __future__ import annotations

import builtins
import os
import time
from collections.abc import Sequence

from replica_program import program_with
from torch import Tensor

from actors.runtime.program import Interrupt
from pipelines.training.replica.replica import ShardedReplica

FATAL_STEP = 20
RAISING_RANK = 1
RAISED, SLOW_S = "RAISED_EXCEPTION", "UNWINDS_FOR_S"
"""Environment variables: the exception as `Name` or `Name:argument`; for how many seconds the other
worker is busy in code that no abort interrupts."""


class RaisingReplica(ShardedReplica):
    def compute(
        self, step: int, interrupt: Interrupt, skipped_batches: Sequence[int] = ()
    ) -> Tensor:
        if step == FATAL_STEP and self.groups.world_rank == RAISING_RANK:
            name, _, argument = os.environ[RAISED].partition(":")
            raise getattr(builtins, name)(*([int(argument)] if argument else []))
        sums = super().compute(step, interrupt, skipped_batches)
        if step == FATAL_STEP:
            time.sleep(float(os.environ[SLOW_S]))
        return sums


Program = program_with(RaisingReplica)
