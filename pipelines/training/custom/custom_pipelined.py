"""Microbatches of the user's own through the stages of a pipeline."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pipelines.training.custom.custom_pipeline import (
    cut_back,
    filled_up,
    having_called,
    inputs_of,
    refuse_other,
)
from pipelines.training.custom.custom_workload import CustomBatch, CustomWorkload
from pipelines.training.passes.passes import evaluating
from pipelines.training.passes.pipeline import Pipelined
from pipelines.training.passes.stage_buffers import StageBuffers
from pipelines.training.workload.workload import Sums


class CustomPipelined(Pipelined):
    """The first stage is given what the recipe's loss calls its module with, and the last one has
    the loss called with a module that returns the output. Batches are of any form: losses look
    theirs up by its number.

    Smaller microbatches, of which an evaluation may have one, are filled up, and the output cut.
    """

    workload: CustomWorkload
    needs_full_size = False

    def __init__(self, *of: Any, moving: StageBuffers) -> None:
        super().__init__(*of)
        self.moving = moving
        for number, module in enumerate(self.sharded.modules):
            module.register_forward_pre_hook(partial(self._before_pass, number))
            module.register_forward_hook(partial(self._after_pass, number))

    def train(self, feds: Iterable[CustomBatch], num_rounds: int) -> list[Sums]:
        return [kinds[0] for kinds in self._run_all(list(feds), num_rounds, training=True)]

    def evaluate(self, feds: Iterable[CustomBatch], num_rounds: int) -> list[list[Sums]]:
        with torch.no_grad(), evaluating(self.sharded):
            return self._run_all(list(feds), num_rounds, training=False)

    def _run_all(
        self, feds: Sequence[CustomBatch], num_rounds: int, training: bool
    ) -> list[list[Sums]]:
        self.workload.values.release()
        self._feds, self._training = feds, training
        self._found: dict[int, list[Sums]] = {}
        self._num_run = [0] * len(self.stages)
        schedule = self._schedule(num_rounds)
        run = schedule.step if training else schedule.eval
        inputs: list[Tensor] = []
        if self.stages[0].number == 0:
            inputs.append(torch.cat([self._inputs(fed) for fed in feds]))
        options: dict[str, Any] = {}
        if self.has_last:
            options = {"target": torch.arange(len(feds)), "losses": []}
        run(*inputs, **options)
        found = [self._found[number] for number in sorted(self._found)]
        del self._feds, self._found
        return found

    def _before_pass(self, stage: int, module: nn.Module, inputs: Any) -> None:
        if self._training:
            self.moving.begin_pass(stage)

    def _after_pass(self, stage: int, module: nn.Module, inputs: Any, output: Any) -> None:
        """A schedule takes a stage's microbatches in their order."""
        if self._training:
            fed = self._feds[self._num_run[stage]]
            self._num_run[stage] += 1
            self.moving.end_pass(fed.num_samples, stage)

    def _inputs(self, fed: CustomBatch) -> Tensor:
        loss, first = self.workload.loss_in(self._training), self.workload.flow[0]
        inputs = filled_up(inputs_of(loss, fed.value, self._training), len(first))
        refuse_other(inputs, first, "the recipe's loss calls its module with")
        return inputs

    def _loss(self, output: Tensor, targets: Tensor) -> Tensor:
        number = int(targets)
        fed = self._feds[number]
        own = cut_back(output, fed.num_held, self.num_samples)
        kinds = [
            kind(having_called(own, self._training), fed, self.spread)
            for kind in self.workload.kinds(self._training)
        ]
        self._found[number] = [Sums(loss.detach(), num_tokens) for loss, num_tokens in kinds]
        return kinds[0].loss.clone()  # schedules detach it in place, which no view allows
