"""The replica of a custom training loop: one rank's part of the module."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from actors.runtime.program import Groups, Interrupt
from pipelines.loop.errors import LoopMisused
from pipelines.loop.loop import Loop
from pipelines.loop.passes import LoopPasses
from pipelines.settings import TrainSettings
from pipelines.training.passes.pass_size import PassObservations
from pipelines.training.passes.passes import Passes
from pipelines.training.passes.running_buffers import RunningBuffers
from pipelines.training.passes.stage_buffers import StageBuffers
from pipelines.training.passes.stage_modules import Stage
from pipelines.training.replica.replica import ShardedReplica
from pipelines.training.workload.workload import Workload


class LoopReplica(ShardedReplica):
    """A replica whose training passes the script drives; see `actors.runtime.program.Replica`."""

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

    def _pipeline_passes(self, stages: Sequence[Stage], moving: StageBuffers) -> Passes:
        raise LoopMisused("pp: a custom training loop cannot run as a pipeline; set pp=1")

    def _passes(self, moving: RunningBuffers) -> Passes:
        is_warm_up = self.groups.assignment.generation == 0
        is_first = self.groups.world_rank == 0 and not is_warm_up
        self.loop_passes = LoopPasses(
            self.workload,
            self.sharded,
            self.parallel,
            moving,
            self.pass_size,
            self.loop,
            is_first,
        )
        return self.loop_passes

    def read_early(self) -> None:
        """Nothing is read early: the script's own code, which runs until its next pass, may use the
        random generators that reading seeds."""

    def compute(
        self, step: int, interrupt: Interrupt, skipped_batches: Sequence[int] = ()
    ) -> Tensor:
        self.loop_passes.step = step
        num_read = (step - 1) * self.settings.batch
        self.loop_passes.epoch = num_read // self.workload.num_samples
        return super().compute(step, interrupt, skipped_batches)
