"""The replica of a custom training loop: one rank's part of the module."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from actors.distributed.stall import wait_for
from actors.distributed.torch_private import scale_tensors
from actors.runtime.program import Applied, Groups, Interrupt
from elastic.protocol.votes import Vote
from pipelines.loop.loop import Loop
from pipelines.loop.passes import LoopPasses
from pipelines.loop.prepared.errors import LoopMisused
from pipelines.loop.thread import Request
from pipelines.loop.whole_weights import gather_whole
from pipelines.settings import TrainSettings
from pipelines.training.passes.pass_size import PassObservations
from pipelines.training.passes.passes import Passes
from pipelines.training.passes.running_buffers import RunningBuffers
from pipelines.training.passes.stage_buffers import StageBuffers
from pipelines.training.passes.stage_modules import Stage
from pipelines.training.replica.replica import ShardedReplica
from pipelines.training.workload.state import SCRIPT_VALUES, state_specs
from pipelines.training.workload.workload import Workload

POLL_S = 1.0
"""How often a worker whose script runs long tells so to those that wait for it."""
BUSY = len(Request) + 1


class LoopReplica(ShardedReplica):
    """A replica whose training passes the script drives; see `actors.runtime.program.Replica`.

    Between two steps the script runs up to its next body. What it requests there, all workers
    provide together: see `_serve`.
    """

    def __init__(
        self,
        workload: Workload,
        settings: TrainSettings,
        groups: Groups,
        observations: PassObservations | None = None,
        *,
        loop: Loop,
    ) -> None:
        self.loop = loop
        super().__init__(workload, settings, groups, observations)
        self._is_alone = groups.assignment.generation == 0
        """Whether this is a warm-up."""
        self._agrees = False
        """Whether the workers know that their scripts have arrived at the same step."""

    def _pipeline_passes(self, stages: Sequence[Stage], moving: StageBuffers) -> Passes:
        raise LoopMisused("pp: a custom training loop cannot run as a pipeline; set pp=1")

    def _passes(self, moving: RunningBuffers) -> Passes:
        return LoopPasses(
            self.workload, self.sharded, self.parallel, moving, self.pass_size, self.loop
        )

    def read_early(self) -> None:
        """Nothing is read early: the script's own code, which runs until its next pass, may use the
        random generators that reading seeds."""

    def compute(
        self, step: int, interrupt: Interrupt, skipped_batches: Sequence[int] = ()
    ) -> Tensor:
        self.loop.is_first_worker = self.groups.world_rank == 0 and not self._is_alone
        self.loop.begin(step, self._epoch(step), self.state.script[SCRIPT_VALUES].tolist)
        interrupt()  # an abandoned thread's loop may have been restarted meanwhile
        self._serve(interrupt, must_agree=not self._agrees)
        self._agrees = True
        return super().compute(step, interrupt, skipped_batches)

    def unscale_gradients(self) -> None:
        if (used := self.loop.values.scaler.used) != 1.0:
            scale_tensors(list(self.state.gradients().values()), 1 / used)

    def apply(self, step: int, vote: Vote) -> Applied:
        applied = super().apply(step, vote)
        self.loop.values.scaler.update(applied.skipped)
        if not self._is_alone:
            following = step + 1 if step < self.settings.steps else 0
            self.loop.commit(following, self._epoch(step + 1))
        return applied

    @property
    def is_done(self) -> bool:
        """Whether the script has left its loop."""
        return self.loop.is_behind

    def between_steps(self, interrupt: Interrupt | None) -> None:
        """Let the script run up to its next body; None for `interrupt`: the groups are broken, so
        that it is served in the next generation."""
        if interrupt is None:
            self.loop.await_arrival()
        else:
            self._serve(interrupt, must_agree=False)
            if self.loop.is_behind:
                self._run_below_loop(interrupt)
        values = self.state.script[SCRIPT_VALUES]
        values.copy_(torch.tensor(self.loop.values.kept, dtype=values.dtype))

    def _run_below_loop(self, interrupt: Interrupt) -> None:
        """Let the first worker's script run to its end; the others serve it."""
        if self.groups.world_rank == 0:
            self.loop.proceed()
        self._serve(interrupt, must_agree=True)

    def _serve(self, interrupt: Interrupt, must_agree: bool) -> None:
        """Provide what scripts request until all wait at their next body or behind their loop.

        Scripts do the same on all workers, unless they know which is the first, or some have
        joined: then the workers agree on what is wanted.
        """
        loop = self.loop
        while True:
            waits = loop.await_arrival(POLL_S)
            interrupt()
            if not (must_agree or loop.request or loop.called.has_diverged):
                if waits:
                    return
                continue
            numbers = self._agree(BUSY if not waits else loop.request.value if loop.request else 0)
            interrupt()  # an aborted reduction may have returned garbage
            wanted = next((kind for kind in Request if numbers[kind.value]), None)
            if wanted is not None:
                is_mine = loop.request is wanted
                answer = self._provide(wanted, interrupt, keeps=is_mine)
                if is_mine:
                    loop.answer(answer)
            elif not numbers[BUSY]:
                return

    def _agree(self, number: int) -> list[int]:
        """How many workers give each number."""
        numbers = torch.zeros(1 + BUSY, dtype=torch.int32, device=self.groups.device)
        numbers[number] = 1
        wait_for(self.groups.world.allreduce([numbers]))
        counted: list[int] = numbers.tolist()
        return counted

    def _provide(self, wanted: Request, interrupt: Interrupt, keeps: bool) -> Any:
        if wanted is Request.EVALUATION:
            return self.evaluate(self.settings.steps, interrupt)
        specs = state_specs(self.workload, self.settings)
        weights = [spec for spec in specs if spec.kind != "optimizer"]
        into = self.loop.called.tensors() if keeps else {}
        gather_whole(weights, self.state.tensors(), self.groups, interrupt, into)
        return None

    def _epoch(self, step: int) -> int:
        return (step - 1) * self.settings.batch // self.workload.num_samples
