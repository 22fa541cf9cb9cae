"""The experts of a model that `ep` can deal to ranks: stacks of weights, called with choices."""

from __future__ import annotations

from inspect import signature
from math import gcd
from typing import NamedTuple

from torch import nn

from pipelines.training.models.expert_parallel import number_of
from pipelines.training.workload.workload import starred

NUM_INPUTS = 4
"""The parameters of a forward: the module, tokens, chosen experts, and their weights."""


class StackedExperts(NamedTuple):
    """The names of a model's modules of experts, with stars for numbers; the number that `ep` must
    divide; and why the experts cannot be dealt to ranks, or ''."""

    names: tuple[str, ...]
    num_experts: int
    problem: str


def stacked_experts(model: nn.Module) -> StackedExperts:
    """The experts of a `transformers` model."""
    found = {
        name: part for name, part in model.named_modules() if name.rpartition(".")[2] == "experts"
    }
    unfit = next((part for part in found.values() if not _is_stacked(part)), None)
    if unfit is not None:
        problem = (
            f"{type(unfit).__name__} is not called with tokens, chosen experts and weights, or its "
            "weights are not stacked by expert"
        )
        return StackedExperts((), 1, problem)
    names = tuple(dict.fromkeys(starred(name) for name in found))
    return StackedExperts(names, gcd(*map(number_of, found.values())) or 1, "")


def _is_stacked(experts: nn.Module) -> bool:
    num_experts = number_of(experts)
    has_inputs = len(signature(type(experts).forward).parameters) == NUM_INPUTS
    return has_inputs and num_experts > 1 and getattr(experts, "num_experts", 0) == num_experts
