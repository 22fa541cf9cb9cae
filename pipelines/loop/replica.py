"""The replica of a custom training loop: one rank's part of the module."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from actors.distributed.stall import wait_for
from actors.runtime.program import Applied, Groups, Interrupt
from elastic.protocol.votes import Vote
from pipelines.loop.errors import LoopMisused
from pipelines.loop.loop import Loop
from pipelines.loop.passes import LoopPasses
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

    def apply(self, step: int, vote: Vote) -> Applied:
        applied = super().apply(step, vote)
        if not self._is_alone:
            following = step + 1 if step < self.settings.steps else 0
            self.loop.commit(following, self._epoch(step + 1))
        return applied

    def between_steps(self, interrupt: Interrupt | None) -> None:
        """Let the script run up to its next body; None for `interrupt`: the groups are broken, so
        that it is served in the next generation."""
        self.loop.await_arrival()
        if interrupt is not None:
            self._serve(interrupt, must_agree=False)
        values = self.state.script[SCRIPT_VALUES]
        values.copy_(torch.tensor(self.loop.values.kept, dtype=values.dtype))

    def _serve(self, interrupt: Interrupt, must_agree: bool) -> None:
        """Provide what scripts request until all have arrived at their next body.

        Scripts do the same on all workers, unless they know which is the first, or some have
        joined: then the workers agree on what is wanted.
        """
        loop = self.loop
        while must_agree or loop.request is not None or loop.called.has_diverged:
            wanted = self._agree(loop.request)
            interrupt()  # an aborted reduction may have returned garbage
            if wanted is None:
                return
            is_mine = loop.request is wanted
            answer = self._provide(wanted, interrupt, keeps=is_mine)
            if is_mine:
                loop.answer(answer)

    def _agree(self, request: Request | None) -> Request | None:
        """One of the requests of all workers, None if there is none."""
        wanted = torch.zeros(len(Request), dtype=torch.int32, device=self.groups.device)
        if request is not None:
            wanted[request.value - 1] = 1
        wait_for(self.groups.world.allreduce([wanted]))
        numbers = wanted.tolist()
        return next((kind for kind in Request if numbers[kind.value - 1]), None)

    def _provide(self, wanted: Request, interrupt: Interrupt, keeps: bool) -> Any:
        if wanted is Request.EVALUATION:
            return self.evaluate(self.settings.steps, interrupt)
        specs = state_specs(self.workload, self.settings)
        weights = [spec for spec in specs if spec.kind != "optimizer"]
        return gather_whole(weights, self.state.tensors(), self.groups, interrupt, keeps)

    def _epoch(self, step: int) -> int:
        return (step - 1) * self.settings.batch // self.workload.num_samples
