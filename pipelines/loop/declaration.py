"""Declaration of a custom training loop: what the run must know before the first step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from torch import nn

from pipelines.loop.modules.model_views import plain
from pipelines.loop.prepared.called_module import CalledModels
from pipelines.loop.prepared.data_source import DataSource
from pipelines.loop.prepared.optimizer_factory import ScriptOptimizerFactory
from pipelines.loop.state.carried_state import CarriedState
from pipelines.loop.state.errors import LoopMisused
from pipelines.loop.state.microbatch_state import MicrobatchStates
from pipelines.loop.state.script_variables import ScriptVariables
from pipelines.settings.recipe import Dataset
from pipelines.training.models.joined_model import joined

Reduction = Literal["mean", "sum"]
"""How a loss is made of those of its samples."""


@dataclass(frozen=True)
class EvaluationSetup:
    """Held-out data and their losses; `losses(model, batch)` is the mean loss over a batch."""

    dataset: Dataset
    losses: Callable[[nn.Module, Any], Any]
    metrics: Mapping[str, Callable[[nn.Module, Any], Any]]


@dataclass(frozen=True)
class StepCounts:
    """What a script passes to `run.steps`."""

    num_steps: int
    microbatches: int
    updates_per_batch: int


@dataclass(frozen=True)
class Declaration:
    """All that a script declares.

    A step's batch is `counts.microbatches` microbatches of `source.microbatch` samples, with any
    number of workers.
    """

    called: CalledModels
    """The targets of the calls of the declared modules."""
    optimizer_factory: ScriptOptimizerFactory
    source: DataSource
    counts: StepCounts
    carried: CarriedState
    states: MicrobatchStates
    variables: ScriptVariables
    evaluation: EvaluationSetup | None = None
    plan: Mapping[str, Any] = field(default_factory=dict)
    """How `tp` shards the layers of `model`; see `Recipe.plan`."""
    tp_divides: int | None = None
    sequence: Mapping[str | int, int] = field(default_factory=dict)
    """The dims of a batch that `cp` cuts; see `Recipe.sequence`."""
    experts: Sequence[str] = ()
    """The modules whose experts `ep` deals to ranks; see `Recipe.experts`."""
    has_epochs: bool = False
    """Whether the script loops over epochs, and over the steps of each."""
    in_one_pass: bool = False
    """Whether a worker computes all its microbatches of a step together."""
    sums_losses: bool = False
    """Whether a loss is the sum of those of its samples, not their mean."""

    @property
    def model(self) -> nn.Module:
        """What is trained; from the script's first step on its values are others."""
        return joined([plain(model) for model in self.called.declared])

    def begin_in_epoch(self, is_first: bool) -> None:
        """The script reads its first step in an epoch, behind code for the whole epoch.

        If the step `is_first` of the epoch, it begins with what that code has changed, also when it
        comes again. Else the code has run in an earlier step on other workers.
        """
        state = self.optimizer_factory.state
        if is_first:
            state.begin_here()
        else:
            state.restore()
        self.variables.note()

    @property
    def batch(self) -> int:
        """Samples per step."""
        return self.source.microbatch * self.counts.microbatches


def in_one_pass(declaration: Declaration, reduction: Reduction) -> Declaration:
    """The declaration of a script with its own loop over its loader. Raises `LoopMisused` for what
    only the microbatches of a step have."""
    if reduction not in get_args(Reduction):
        raise LoopMisused(f'run.range: reduction={reduction!r}: give "mean" or "sum"')
    named = {"run.state": declaration.states.states, "`sequence`": declaration.sequence}
    if used := next((name for name, value in named.items() if value), None):
        raise LoopMisused(
            f"run.range: {used} needs single microbatches: loop over run.epochs(...), with `with "
            "step:` and step.batches()"
        )
    return replace(declaration, in_one_pass=True, sums_losses=reduction == "sum")


class NotDeclared(LoopMisused):
    """The script ended without a step."""
