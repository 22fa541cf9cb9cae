"""Sequential forward and backward passes of a step's microbatches through a full module."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch.distributed.tensor.parallel import loss_parallel

from pipelines.training.passes.pass_size import PassSize
from pipelines.training.passes.running_buffers import RunningBuffers
from pipelines.training.sharding.sharded import Sharded
from pipelines.training.workload.parallel_groups import ParallelGroups
from pipelines.training.workload.workload import LossSums, Workload


class Passes(Protocol):
    """Runs microbatches through the modules of one rank."""

    needs_full_size: bool
    """Whether all microbatches, including padding, must have the same shape."""

    def agree_on_size(self) -> int:
        """The most microbatches of a training pass, equal on all ranks; see `PassSize.agree`."""

    def num_rounds(self, least: int) -> int:
        """The number of passes, at least `least`, that each rank must run."""

    def train(self, microbatch_inputs: Iterable[Any], num_rounds: int) -> list[LossSums]:
        """Run forward and backward of all passes."""

    def evaluate(self, microbatch_inputs: Iterable[Any], num_rounds: int) -> list[list[LossSums]]:
        """Run forward without gradients; for each microbatch the loss and the metrics."""


class SequentialPasses:
    """Runs passes one by one through the full module; see `Passes`."""

    def __init__(
        self,
        workload: Workload,
        sharded: Sharded,
        parallel: ParallelGroups,
        moving: RunningBuffers,
        size: PassSize,
    ) -> None:
        self.size = size
        self.workload = workload
        self.moving = moving
        self.sharded = sharded
        [self.module] = sharded.modules
        self.parallel = parallel
        self.needs_full_size = not (parallel.has_whole_sequences or workload.has_constant_size)

    def agree_on_size(self) -> int:
        return self.size.agree()

    def num_rounds(self, least: int) -> int:
        return least

    def train(self, microbatch_inputs: Iterable[Any], num_rounds: int) -> list[LossSums]:
        sums = []
        with loss_context(self.parallel):
            for number, fed in enumerate(microbatch_inputs, start=1):
                is_last = number == num_rounds
                if number == 1 or is_last:
                    self.sharded.accumulate(is_last)
                self.moving.begin_pass()
                with self.size.watched(self.module):
                    loss, num_tokens = self.workload.losses(self.module, fed, self.parallel)
                self.moving.end_pass(num_tokens, is_last)
                loss.backward()
                sums.append(LossSums(loss.detach(), num_tokens))
        return sums

    def evaluate(self, microbatch_inputs: Iterable[Any], num_rounds: int) -> list[list[LossSums]]:
        kinds = [self.workload.losses, *self.workload.metrics.values()]
        with torch.no_grad(), loss_context(self.parallel), evaluating(self.sharded):
            return [
                [kind(self.module, fed, self.parallel) for kind in kinds]
                for fed in microbatch_inputs
            ]


def loss_context(parallel: ParallelGroups) -> AbstractContextManager[None]:
    """The context of the loss: vocabulary-parallel under `tp`."""
    return loss_parallel() if parallel.tp is not None else nullcontext()


class evaluating:
    """Sets modules to evaluation mode, and releases gathered parameters at the end, since there is
    no backward pass to do so. Parts that are in evaluation mode while training, such as a frozen
    BatchNorm, stay in it."""

    def __init__(self, sharded: Sharded) -> None:
        self.sharded = sharded

    def __enter__(self) -> None:
        parts = [part for module in self.sharded.modules for part in module.modules()]
        self._trained = [part for part in parts if part.training]
        self._others = [part for part in parts if not part.training]
        for module in self.sharded.modules:
            module.eval()

    def __exit__(self, *error: object) -> None:
        self.sharded.release()
        for module in self.sharded.modules:
            module.train()  # a module may do more in it than to set `training`
        for part in self._others:
            part.eval()
        for part in self._trained:
            part.training = True
