"""The plans of tensor and expert parallelism that a script gives with its models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import gcd
from typing import Any

from pipelines.loop.state.errors import LoopMisused
from pipelines.training.models.joined_model import prefix_of


class TensorPlans:
    """Collects the plans of all models of a script."""

    def __init__(self) -> None:
        self._plans: dict[int, Mapping[str, Any]] = {}
        self._divides: list[int] = []
        self._experts: dict[int, Sequence[str]] = {}

    def add(
        self,
        plan: Mapping[str, Any],
        tp_divides: int | None,
        experts: Sequence[str],
        model: int,
        num_models: int,
    ) -> None:
        """Add the plan and the experts of a model, by its number among all; `num_models` are given
        with it.

        Raises `LoopMisused` unless there is one.
        """
        if num_models != 1:
            raise LoopMisused(
                f"run.prepare: a plan with {num_models} models: pass it in a call with the one "
                "model whose layers it names"
            )
        self._plans[model] = plan
        self._experts[model] = experts
        if tp_divides is not None:
            self._divides.append(tp_divides)

    def joined(self, num_models: int) -> tuple[dict[str, Any], int | None]:
        """The plan of all models as one module, and the number that `tp` must divide."""
        plan = {
            prefix_of(model, num_models) + name: style
            for model, names in self._plans.items()
            for name, style in names.items()
        }
        return plan, gcd(*self._divides) or None

    def experts(self, num_models: int) -> list[str]:
        """The names of the modules of experts, in all models as one module."""
        return [
            prefix_of(model, num_models) + name
            for model, names in self._experts.items()
            for name in names
        ]
