"""A program of which one worker dies while its large messages to all others are half sent."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence

import torch

from actors.program import Groups, Interrupt
from actors.standstill import wait_for
from pipelines.program import TrainingProgram
from pipelines.training.replica import ShardedReplica

FATAL_STEP = 9
MESSAGE_BYTES = 128 << 20
HALF_WAY_S = 0.02
"""Three such messages over loopback take ten times as long."""


class HalfSent(ShardedReplica):
    """Before one step of the first generation the last rank sends to all others."""

    def compute(
        self, step: int, interrupt: Interrupt, left_out: Sequence[int] = ()
    ) -> torch.Tensor:
        if step == FATAL_STEP and self.groups.assignment.generation == 1:
            self._receive_from_the_last()
        return super().compute(step, interrupt, left_out)

    def _receive_from_the_last(self) -> None:
        world, last = self.groups.world, self.groups.layout.num_workers - 1
        message = torch.zeros(MESSAGE_BYTES, dtype=torch.uint8)
        if self.groups.world_rank != last:
            wait_for(world.recv([message], last, 0))
        for receiver in range(last):
            world.send([message], receiver, 0)
        time.sleep(HALF_WAY_S)
        os.kill(os.getpid(), signal.SIGKILL)


class HalfSentProgram(TrainingProgram):
    def build(self, groups: Groups) -> ShardedReplica:
        return HalfSent(self.workload, self.settings, groups)
