"""A script's own optimizer and scheduler, as the run steps them for whatever shards there are."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from pipelines.loop.errors import LoopMisused

NO_PARAMETERS = "params"
BASE_LR, LR = "initial_lr", "lr"


class AsPrepared:
    """See `pipelines.training.workload.optimizer.Optimizing`.

    The optimizer is made anew for each shard as unpickling would make it, so that any class does;
    the scheduler is stepped once a step, ahead of time, on the script's own optimizer, which steps
    nothing else.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        scheduler: LRScheduler | None,
        names: Mapping[nn.Parameter, str],
        max_grad_norm: float | None,
    ) -> None:
        """`names` are those of the model's parameters. Raises `LoopMisused` for an optimizer of
        others, and for a scheduler of another optimizer."""
        if scheduler is not None and scheduler.optimizer is not optimizer:
            raise LoopMisused("run.prepare: the scheduler is that of another optimizer")
        self.max_grad_norm = max_grad_norm
        self._optimizer = optimizer
        self._scheduler = scheduler
        self._groups = [
            {key: value for key, value in group.items() if key != NO_PARAMETERS}
            | {LR: group.get(BASE_LR, group[LR])}
            for group in optimizer.param_groups
        ]
        self._group_of = {
            _name_of(parameter, names): number
            for number, group in enumerate(optimizer.param_groups)
            for parameter in group[NO_PARAMETERS]
        }
        self._see_that_all_are_stepped(names)
        self._rates = [self._rate_now()]

    def build(self, shards: Sequence[tuple[str, Tensor]]) -> Optimizer:
        """The groups as the script made them; those of which no shard is here are left out."""
        members: list[list[Tensor]] = [[] for _ in self._groups]
        for name, shard in shards:
            members[self._group_of[name]].append(shard)
        groups = [
            {NO_PARAMETERS: own, **settings}
            for own, settings in zip(members, self._groups, strict=True)
            if own
        ]
        made: Optimizer = object.__new__(type(self._optimizer))
        made.__setstate__(
            {
                "defaults": dict(self._optimizer.defaults),
                "state": defaultdict(dict),
                "param_groups": groups,
            }
        )
        return made

    def rate(self, step: int) -> float:
        """Raises `LoopMisused` for a scheduler that changes more than learning rates, or these by
        other factors from group to group."""
        while len(self._rates) < step and self._scheduler is not None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # that nothing has been stepped yet
                self._scheduler.step()
            self._rates.append(self._rate_now())
        return self._rates[min(step, len(self._rates)) - 1]

    def _rate_now(self) -> float:
        rates = []
        for group, settings in zip(self._optimizer.param_groups, self._groups, strict=True):
            if not settings[LR]:
                raise LoopMisused("run.prepare: a group of parameters has learning rate 0")
            changed = [k for k, v in settings.items() if k != LR and _differ(group[k], v)]
            if changed:
                raise LoopMisused(
                    f"run.prepare: {type(self._scheduler).__name__} changes {changed[0]}, too; "
                    "only learning rates can follow a schedule"
                )
            rates.append(float(group[LR]) / float(settings[LR]))
        if max(rates) - min(rates) > 1e-9 * max(map(abs, rates)):
            raise LoopMisused(
                f"run.prepare: {type(self._scheduler).__name__} has another course for each group "
                "of parameters; one factor for all can be had"
            )
        return rates[0]

    def _see_that_all_are_stepped(self, names: Mapping[nn.Parameter, str]) -> None:
        missing = [
            name
            for parameter, name in names.items()
            if parameter.requires_grad and name not in self._group_of
        ]
        if missing:
            raise LoopMisused(
                f"run.prepare: the optimizer has no parameter {missing[0]}: give it all of the "
                "model's, or freeze those (requires_grad_(False))"
            )


def _name_of(parameter: nn.Parameter, names: Mapping[nn.Parameter, str]) -> str:
    if parameter not in names:
        raise LoopMisused(
            f"run.prepare: the optimizer has a parameter of shape {tuple(parameter.shape)} that is "
            "none of the model's"
        )
    return names[parameter]


def _differ(first: Any, second: Any) -> bool:
    return bool(first != second)
