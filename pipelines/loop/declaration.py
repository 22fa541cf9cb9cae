"""What a script declares before it asks for its first step: all that the run must know of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sized
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.utils.data import Dataset

from pipelines.loop.errors import LoopMisused
from pipelines.loop.stepping import AsPrepared


@dataclass(frozen=True)
class EvaluationSetup:
    """`losses(model, batch)` is the mean loss over a batch of held-out samples."""

    dataset: Dataset[Any]
    losses: Callable[[nn.Module, Any], Any]
    metrics: Mapping[str, Callable[[nn.Module, Any], Any]]


@dataclass(frozen=True)
class Declaration:
    """A step's batch is `num_microbatches` of `microbatch` samples, on whatever workers."""

    model: nn.Module
    """With the values of step 0."""
    optimising: AsPrepared
    dataset: Dataset[Any]
    collate: Callable[[list[Any]], Any]
    microbatch: int
    num_microbatches: int
    steps: int
    evaluation: EvaluationSetup | None = None

    @property
    def batch(self) -> int:
        """Samples a step."""
        return self.microbatch * self.num_microbatches

    @property
    def num_samples(self) -> int:
        assert isinstance(self.dataset, Sized)
        return len(self.dataset)


class NotDeclared(LoopMisused):
    """The script ended without asking for a step."""
