"""Pipeline-parallel passes of microbatches, by torch's schedules."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from actors.runtime.program import Groups
from pipelines.settings import TrainSettings
from pipelines.settings.bounds import SEVERAL_STAGES, ScheduleName
from pipelines.training.passes.passes import evaluating, loss_context
from pipelines.training.passes.stage_modules import Stage
from pipelines.training.sharding.sharded import Sharded
from pipelines.training.workload.parallel_groups import ParallelGroups
from pipelines.training.workload.workload import LossSums, ModuleInputs, Workload, concatenate

SCHEDULES: dict[ScheduleName, str] = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved_1f1b": "ScheduleInterleaved1F1B",
    "zero_bubble": "ScheduleInterleavedZeroBubble",
}
"""Huang et al., GPipe, 2019; Narayanan et al., PipeDream-Flush and interleaved, 2021; Qi et al.,
Zero Bubble (ZB1P), 2024. Names in `torch_pipelining()`."""


@cache
def torch_pipelining() -> Any:
    """Import `torch.distributed.pipelining`, which takes 1 s, since it imports the compiler.

    Workers import it during warm-up; the command line never does.
    """
    return import_module("torch.distributed.pipelining")


class Pipelined:
    """Runs microbatches through the stages of one rank; see `Passes`.

    Only ranks with the last stage have losses.
    """

    needs_full_size = True

    def __init__(
        self,
        workload: Workload,
        stages: Sequence[Stage],
        sharded: Sharded,
        groups: Groups,
        parallel: ParallelGroups,
        settings: TrainSettings,
    ) -> None:
        self.workload = workload
        self.stages = stages
        self.sharded = sharded
        self.groups = groups
        self.parallel = parallel
        self.schedule = settings.schedule
        self.num_samples = settings.microbatch
        self.num_stages = groups.layout.pp * groups.layout.vp
        self.has_last = stages[-1].number == self.num_stages - 1
        self._schedules: dict[tuple[int, bool], Any] = {}

    def agree_on_size(self) -> int:
        return 1

    def num_rounds(self, least: int) -> int:
        """1F1B needs at least as many microbatches as ranks, the interleaved schedules a multiple
        of that."""
        pp = self.groups.layout.pp
        if self.schedule == "gpipe":
            return least
        return max(least, pp) if self.schedule == "1f1b" else -(-least // pp) * pp

    def train(self, microbatch_inputs: Iterable[Any], num_rounds: int) -> list[LossSums]:
        with loss_context(self.parallel):
            return self._run(list(microbatch_inputs), self._schedule(num_rounds, trains=True).step)

    def evaluate(self, microbatch_inputs: Iterable[Any], num_rounds: int) -> list[list[LossSums]]:
        with torch.no_grad(), loss_context(self.parallel), evaluating(self.sharded):
            schedule = self._schedule(num_rounds, trains=False)
            return [[sums] for sums in self._run(list(microbatch_inputs), schedule.eval)]

    def _run(self, microbatch_inputs: list[ModuleInputs], run: Any) -> list[LossSums]:
        batch = concatenate(microbatch_inputs)
        losses: list[Tensor] = []
        options: dict[str, Any] = dict(batch.keywords)
        if self.has_last:
            options |= {"target": batch.targets, "losses": losses}
        run(*[batch.inputs] if self.stages[0].number == 0 else [], **options)
        return [
            LossSums(loss.detach(), self.workload.num_tokens(fed.targets))
            for loss, fed in zip(losses, microbatch_inputs, strict=self.has_last)
        ]

    def _schedule(self, num_rounds: int, trains: bool) -> Any:
        """Evaluation uses schedules of its own: in torch 2.11 a stage that evaluates first never
        requests gradients of its inputs."""
        key = num_rounds, trains
        if key not in self._schedules:
            make = getattr(torch_pipelining(), SCHEDULES[self.schedule])
            stages: Any = [
                self._stage(number, *pair)
                for number, pair in enumerate(zip(self.stages, self.sharded.modules, strict=True))
            ]
            if self.schedule not in SEVERAL_STAGES:
                [stages] = stages
            self._schedules[key] = make(stages, num_rounds, loss_fn=self._loss, scale_grads=False)
        return self._schedules[key]

    def _loss(self, output: Tensor, targets: Tensor) -> Tensor:
        return self.workload.loss(output, targets, self.parallel)

    def _stage(self, number: int, stage: Stage, module: nn.Module) -> Any:
        """Build a stage with the shapes of its input and output, which torch would otherwise infer
        with a pass.

        After a backward of weights alone its gradients are summed in the dtype of the reduction:
        torch would add them up in that of the computation.
        """
        first, stop = stage.layers.start, stage.layers.stop
        inputs, output = (
            self.workload.flowing(layer, self.num_samples, self.parallel) for layer in (first, stop)
        )
        built = torch_pipelining().PipelineStage(
            module,
            stage.number,
            self.num_stages,
            self.groups.device,
            input_args=inputs,
            output_args=output,
            group=self.groups.mesh.get_group("pp"),
        )
        backward_weights = built.backward_weight_one_chunk

        def backward_and_sum(*args: Any, **kwargs: Any) -> None:
            backward_weights(*args, **kwargs)
            self.sharded.sum_gradients(number)

        built.backward_weight_one_chunk = backward_and_sum
        return built
