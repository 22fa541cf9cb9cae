"""Pipeline passes of a custom model: microbatches of any form through the stages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pipelines.training.custom.modules.custom_pipeline import (
    CustomBatch,
    inputs_of,
    module_returning,
    pad_rows,
    refuse_other_tensor,
    unpad_rows,
)
from pipelines.training.passes.passes import evaluating
from pipelines.training.passes.pipeline import Pipelined
from pipelines.training.passes.stage_buffers import StageBuffers
from pipelines.training.workload.workload import CustomLoss, LossSums


class CustomPipelined(Pipelined):
    """Pipeline passes of a recipe.

    The first stage gets the tensor that the recipe's loss calls its module with. The last stage
    calls the loss with a substitute module that returns the pipeline's output. Batches may have any
    form: the loss finds its microbatch by index.

    A smaller microbatch, which an evaluation may have, is padded, and its output is unpadded.
    """

    needs_full_size = False

    def __init__(self, *arguments: Any, custom_loss: CustomLoss, moving: StageBuffers) -> None:
        super().__init__(*arguments)
        self.custom_loss = custom_loss
        self.moving = moving
        for number, module in enumerate(self.sharded.modules):
            module.register_forward_pre_hook(partial(self._before_pass, number))
            module.register_forward_hook(partial(self._after_pass, number))

    def train(self, microbatch_inputs: Iterable[CustomBatch], num_rounds: int) -> list[LossSums]:
        return [
            kinds[0] for kinds in self._run_all(list(microbatch_inputs), num_rounds, training=True)
        ]

    def evaluate(
        self, microbatch_inputs: Iterable[CustomBatch], num_rounds: int
    ) -> list[list[LossSums]]:
        with torch.no_grad(), evaluating(self.sharded):
            return self._run_all(list(microbatch_inputs), num_rounds, training=False)

    def _run_all(
        self, microbatch_inputs: Sequence[CustomBatch], num_rounds: int, training: bool
    ) -> list[list[LossSums]]:
        self.custom_loss.release()
        self._feds, self._training = microbatch_inputs, training
        self._sums: dict[int, list[LossSums]] = {}
        self._num_run = [0] * len(self.stages)
        schedule = self._schedule(num_rounds, training)
        run = schedule.step if training else schedule.eval
        inputs: list[Tensor] = []
        if self.stages[0].number == 0:
            inputs.append(torch.cat([self._inputs(fed) for fed in microbatch_inputs]))
        options: dict[str, Any] = {}
        if self.has_last:
            options = {"target": torch.arange(len(microbatch_inputs)), "losses": []}
        run(*inputs, **options)
        sums = [self._sums[number] for number in sorted(self._sums)]
        del self._feds, self._sums
        return sums

    def _before_pass(self, stage: int, module: nn.Module, inputs: Any) -> None:
        fed = self._feds[self._num_run[stage]]
        self.custom_loss.begin_blocks(fed, self._training)
        if self._training:
            self.moving.begin_pass(stage)

    def _after_pass(self, stage: int, module: nn.Module, inputs: Any, output: Any) -> None:
        """Count the passes of a stage: a schedule runs its microbatches in order."""
        fed = self._feds[self._num_run[stage]]
        self._num_run[stage] += 1
        if self._training:
            self.moving.end_pass(fed.num_samples, stage)

    def _inputs(self, fed: CustomBatch) -> Tensor:
        loss, first = self.custom_loss.loss_in(self._training), self.custom_loss.flow[0]
        self.custom_loss.begin_loss(fed, self._training)
        inputs = pad_rows(inputs_of(loss, fed.value, self._training), len(first))
        refuse_other_tensor(inputs, first, "the recipe's loss calls its module with")
        return inputs

    def _loss(self, output: Tensor, targets: Tensor) -> Tensor:
        number = int(targets)
        fed = self._feds[number]
        unpadded = unpad_rows(output, fed.num_held, self.num_samples)
        self.custom_loss.begin_loss(fed, self._training)
        called = self.custom_loss.behind_blocks
        kinds = [
            kind(module_returning(unpadded, self._training, called), fed, self.parallel)
            for kind in self.custom_loss.kinds(self._training)
        ]
        self._sums[number] = [LossSums(loss.detach(), num_tokens) for loss, num_tokens in kinds]
        return kinds[0].loss.clone()  # schedules detach it in place, which a view forbids
