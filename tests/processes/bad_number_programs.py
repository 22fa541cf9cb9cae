"""Programs with bad numbers: in the loss, only in the gradients, in the sum over the ranks."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

import torch
from replica_program import program_with
from torch import Tensor, nn

from actors.runtime.program import Applied, Evaluation, Interrupt
from elastic.geometry.sample_order import batch_number
from elastic.protocol.votes import Vote
from pipelines.training.replica.replica import ShardedReplica
from pipelines.training.workload.parallel_groups import ParallelGroups
from pipelines.training.workload.workload import LossSums, ModuleInputs, Workload, output_losses

BAD_STEP = 9
SPIKE_BATCH = 12


class ScaledWorkload:
    """A workload that multiplies its losses, or only their gradients, by a factor."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self.factor = self.gradient_factor = 1.0
        self.counts = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._workload, name)

    def losses(self, module: nn.Module, fed: ModuleInputs, parallel: ParallelGroups) -> LossSums:
        sums = output_losses(self, module, fed, parallel)
        return sums if self.counts else LossSums(sums.loss * 0.0, torch.zeros_like(sums.num_tokens))

    def loss(self, output: Tensor, targets: Tensor, parallel: ParallelGroups) -> Tensor:
        loss = self._workload.loss(output, targets, parallel) * self.factor
        if self.gradient_factor != 1.0 and loss.requires_grad:
            factor = self.gradient_factor
            loss.register_hook(lambda gradient: gradient * factor)
        return loss


class ScalingReplica(ShardedReplica):
    """Sets the factors of the workload for each pass."""

    def __init__(self, workload: Workload, *arguments: Any) -> None:
        self.scaled_workload = ScaledWorkload(workload)
        super().__init__(self.scaled_workload, *arguments)

    def compute(
        self, step: int, interrupt: Interrupt, skipped_batches: Sequence[int] = ()
    ) -> Tensor:
        try:
            return super().compute(step, interrupt, skipped_batches)
        finally:
            self.scaled_workload.factor = self.scaled_workload.gradient_factor = 1.0

    def _feed_round(self, step: int, microbatches: Sequence[int]) -> ModuleInputs:
        self.scaled_workload.factor = self.scaled_workload.gradient_factor = 1.0
        for microbatch in microbatches:
            self._set_factors(step, microbatch)
        return super()._feed_round(step, microbatches)

    def _set_factors(self, step: int, microbatch: int) -> None:
        """Set the factors of the workload for the pass of one microbatch."""


class NanLoss(ScalingReplica):
    """The loss of one microbatch of one step is NaN, so on one data rank."""

    def _set_factors(self, step: int, microbatch: int) -> None:
        if (step, microbatch) == (BAD_STEP, 0):
            self.scaled_workload.factor = math.nan


class InfiniteGradient(ScalingReplica):
    """One gradient is infinite, although the loss is right."""

    def _set_factors(self, step: int, microbatch: int) -> None:
        if (step, microbatch) == (BAD_STEP, 0):
            self.scaled_workload.gradient_factor = math.inf


class AlwaysNan(ScalingReplica):
    """Each loss from one step on is NaN.

    A step takes longer than a message to the controller and the answer.
    """

    def _set_factors(self, step: int, microbatch: int) -> None:
        if step >= BAD_STEP:
            self.scaled_workload.factor = math.nan
            time.sleep(0.1)


class SpikingBatch(ScalingReplica):
    """The loss spikes in each step that reads one batch: the cause is in the data."""

    def compute(
        self, step: int, interrupt: Interrupt, skipped_batches: Sequence[int] = ()
    ) -> Tensor:
        self.batch_number = batch_number(step, skipped_batches)
        return super().compute(step, interrupt, skipped_batches)

    def _set_factors(self, step: int, microbatch: int) -> None:
        if self.batch_number == SPIKE_BATCH:
            self.scaled_workload.factor = 50.0


class BadEvaluations(ScalingReplica):
    """The held-out loss is NaN after step 2 and infinite after step 3.

    After step 4 the evaluation counts no tokens.
    """

    def evaluate(self, step: int, interrupt: Interrupt) -> Evaluation:
        if step == 1:
            return super().evaluate(step, interrupt)
        self.scaled_workload.factor = {2: math.nan, 3: math.inf}.get(step, 1.0)
        self.scaled_workload.counts = step != 4
        try:
            return super().evaluate(step, interrupt)
        finally:
            self.scaled_workload.factor, self.scaled_workload.counts = 1.0, True


class BadRate(ShardedReplica):
    """The learning rate of one step is not finite."""

    def apply(self, step: int, vote: Vote) -> Applied:
        optimizer = self.state.optimizer
        if step == BAD_STEP:
            optimizer.schedule = lambda step: math.nan
        try:
            return super().apply(step, vote)
        finally:
            if step == BAD_STEP:
                del optimizer.schedule


class OverflowingSum(ShardedReplica):
    """The number of each rank is finite, but their sum is not."""

    def compute(
        self, step: int, interrupt: Interrupt, skipped_batches: Sequence[int] = ()
    ) -> Tensor:
        sums = super().compute(step, interrupt, skipped_batches)
        if step == BAD_STEP:
            sums[2] = 1.7e308
        return sums


nan_loss = program_with(NanLoss)
infinite_gradient = program_with(InfiniteGradient)
always_nan = program_with(AlwaysNan)
spiking_batch = program_with(SpikingBatch)
overflowing_sum = program_with(OverflowingSum)
bad_evaluations = program_with(BadEvaluations)
bad_rate = program_with(BadRate)
