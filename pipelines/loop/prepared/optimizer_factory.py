"""A script's optimizer, adapted so that the run steps it on any shards."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from pipelines.loop.prepared.errors import LoopMisused
from pipelines.loop.prepared.loss_scaler import LossScaler
from pipelines.loop.prepared.script_values import PARAMETERS, ScriptValues

NUMBER = "script_group"
"""The key of a group's number among the script's groups."""


class ScriptOptimizerFactory:
    """A script's optimizer as an `OptimizerFactory`.

    See `pipelines.training.workload.optimizer.OptimizerFactory`. For each set of shards a new
    optimizer is built as unpickling builds it, so any optimizer class works. Its groups have the
    hyperparameters that the script gives them, by hand or by schedulers; see `ScriptValues`.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        schedulers: Sequence[LRScheduler],
        names: Mapping[nn.Parameter, str],
        max_grad_norm: float | None,
        scaler: LossScaler | None = None,
    ) -> None:
        """`names` are the names of the model's parameters.

        Raises `LoopMisused` for an optimizer of other parameters, and for a scheduler of another
        optimizer or one that the run does not know.
        """
        _refuse_foreign(optimizer, schedulers)
        self.max_grad_norm = max_grad_norm
        self.values = ScriptValues(optimizer, schedulers, scaler)
        self._optimizer = optimizer
        self._groups = [
            {key: value for key, value in group.items() if key != PARAMETERS} | {NUMBER: number}
            for number, group in enumerate(optimizer.param_groups)
        ]
        self._group_of = {
            _name_of(parameter, names): number
            for number, group in enumerate(optimizer.param_groups)
            for parameter in group[PARAMETERS]
        }
        self._refuse_unstepped(names)

    @property
    def initial_values(self) -> Tensor:
        return torch.tensor(self.values.initial, dtype=torch.float64)

    def build(self, shards: Sequence[tuple[str, Tensor]]) -> Optimizer:
        """An optimizer with the script's parameter groups that have a shard on this worker."""
        members: list[list[Tensor]] = [[] for _ in self._groups]
        for name, shard in shards:
            members[self._group_of[name]].append(shard)
        groups = [
            {PARAMETERS: shards_of_group, **settings}
            for shards_of_group, settings in zip(members, self._groups, strict=True)
            if shards_of_group
        ]
        built: Optimizer = object.__new__(type(self._optimizer))
        built.__setstate__(
            {
                "defaults": dict(self._optimizer.defaults),
                "state": defaultdict(dict),
                "param_groups": groups,
            }
        )
        return built

    def schedule(self, step: int, groups: Sequence[dict[str, Any]]) -> None:
        """Give the groups what the script's groups had when the script would have stepped."""
        self.values.take()
        assert self.values.taken is not None
        for group in groups:
            group |= self.values.taken[group[NUMBER]]

    def _refuse_unstepped(self, names: Mapping[nn.Parameter, str]) -> None:
        missing = [
            name
            for parameter, name in names.items()
            if parameter.requires_grad and name not in self._group_of
        ]
        if missing:
            raise LoopMisused(
                f"run.prepare: the optimizer lacks parameter {missing[0]}: give it all of the "
                "model's, or freeze the others (requires_grad_(False))"
            )


class LoopOptimizerFactory:
    """The optimizer factory of a loop's present script, which a restart replaces."""

    def __init__(self, present: Callable[[], ScriptOptimizerFactory]) -> None:
        self._present = present

    @property
    def max_grad_norm(self) -> float | None:
        return self._present().max_grad_norm

    @property
    def initial_values(self) -> Tensor:
        return self._present().initial_values

    def build(self, shards: Sequence[tuple[str, Tensor]]) -> Optimizer:
        return self._present().build(shards)

    def schedule(self, step: int, groups: Sequence[dict[str, Any]]) -> None:
        self._present().schedule(step, groups)


def _refuse_foreign(optimizer: Optimizer, schedulers: Sequence[LRScheduler]) -> None:
    if any(scheduler.optimizer is not optimizer for scheduler in schedulers):
        raise LoopMisused(
            "run.prepare: the scheduler belongs to another optimizer; build it with the "
            "optimizer that is prepared"
        )
    # A scheduler wraps the `step` of its optimizer.
    if "step" in vars(optimizer) and not schedulers:
        raise LoopMisused(
            "run.prepare: the optimizer has a learning-rate scheduler; pass it, too, so that its "
            "state survives a change of the workers"
        )


def _name_of(parameter: nn.Parameter, names: Mapping[nn.Parameter, str]) -> str:
    if parameter not in names:
        raise LoopMisused(
            f"run.prepare: the optimizer has a parameter of shape {tuple(parameter.shape)} that "
            "the model does not have"
        )
    return names[parameter]
