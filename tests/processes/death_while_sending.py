"""A program in which one worker dies while it sends large messages to all others."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence

import torch
from replica_program import program_with

from actors.distributed.stall import wait_for
from actors.runtime.program import Interrupt
from pipelines.training.replica.replica import ShardedReplica

FATAL_STEP = 9
DOOMED = "w3"
MESSAGE_BYTES = 128 << 20
HALF_WAY_S = 0.02
"""Three such messages take ten times as long over loopback."""


class HalfSent(ShardedReplica):
    """Before one step the doomed worker, if it is a member, sends to all others."""

    def compute(
        self, step: int, interrupt: Interrupt, skipped_batches: Sequence[int] = ()
    ) -> torch.Tensor:
        members = self.groups.assignment.members
        if step == FATAL_STEP and DOOMED in members:
            self._receive_from(members.index(DOOMED), len(members))
        return super().compute(step, interrupt, skipped_batches)

    def _receive_from(self, sender: int, num_members: int) -> None:
        world = self.groups.world
        message = torch.zeros(MESSAGE_BYTES, dtype=torch.uint8)
        if self.groups.world_rank != sender:
            wait_for(world.recv([message], sender, 0))
            return
        for receiver in range(num_members):
            if receiver != sender:
                world.send([message], receiver, 0)
        time.sleep(HALF_WAY_S)
        os.kill(os.getpid(), signal.SIGKILL)


HalfSentProgram = program_with(HalfSent)
