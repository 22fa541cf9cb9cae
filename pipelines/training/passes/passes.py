"""Forward and backward passes of a step's microbatches through a whole module, one by one."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch.distributed.tensor.parallel import loss_parallel

from pipelines.training.passes.moving_buffers import MovingBuffers
from pipelines.training.sharding.sharded import Sharded
from pipelines.training.workload.spread import Spread
from pipelines.training.workload.workload import Sums, Workload


class Passes(Protocol):
    """How microbatches go through the module parts of one rank."""

    needs_full_size: bool
    """Whether all microbatches have one shape, also those that only pad."""

    def num_rounds(self, least: int) -> int:
        """How many microbatches, at least so many, each rank must run."""

    def train(self, feds: Iterable[Any], num_rounds: int) -> list[Sums]:
        """Forward and backward of all."""

    def evaluate(self, feds: Iterable[Any], num_rounds: int) -> list[list[Sums]]:
        """Forward of all, without gradients: of each the loss, and the workload's metrics."""


class OneByOne:
    """Each microbatch through the whole module; see `Passes`."""

    def __init__(
        self, workload: Workload, sharded: Sharded, spread: Spread, moving: MovingBuffers
    ) -> None:
        self.workload = workload
        self.moving = moving
        self.sharded = sharded
        [self.module] = sharded.modules
        self.spread = spread
        self.needs_full_size = not (spread.has_whole_sequences or workload.keeps_its_size)

    def num_rounds(self, least: int) -> int:
        return least

    def train(self, feds: Iterable[Any], num_rounds: int) -> list[Sums]:
        sums = []
        with loss_context(self.spread):
            for number, fed in enumerate(feds, start=1):
                is_last = number == num_rounds
                if number == 1 or is_last:
                    self.sharded.accumulate(is_last)
                self.moving.begin_pass()
                loss, num_tokens = self.workload.losses(self.module, fed, self.spread)
                self.moving.end_pass(num_tokens, is_last)
                loss.backward()
                sums.append(Sums(loss.detach(), num_tokens))
        return sums

    def evaluate(self, feds: Iterable[Any], num_rounds: int) -> list[list[Sums]]:
        kinds = [self.workload.losses, *self.workload.metrics.values()]
        with torch.no_grad(), loss_context(self.spread), evaluating(self.sharded):
            return [[kind(self.module, fed, self.spread) for kind in kinds] for fed in feds]


def loss_context(spread: Spread) -> AbstractContextManager[None]:
    """Where `tp` cuts the vocabulary, the loss is computed in parts."""
    return loss_parallel() if spread.tp is not None else nullcontext()


class evaluating:
    """Modules in evaluation, whose gathered parameters are let go of at the end: without a
    backward pass nothing else does that."""

    def __init__(self, sharded: Sharded) -> None:
        self.sharded = sharded

    def __enter__(self) -> None:
        for module in self.sharded.modules:
            module.eval()

    def __exit__(self, *error: object) -> None:
        self.sharded.release()
        for module in self.sharded.modules:
            module.train()
