"""A script's optimizer and scheduler, adapted so that the run steps them on any shards."""

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


class ScriptOptimizerFactory:
    """A script's optimizer and scheduler as an `OptimizerFactory`.

    See `pipelines.training.workload.optimizer.OptimizerFactory`. For each set of shards a new
    optimizer is built as unpickling builds it, so any optimizer class works. The scheduler is
    stepped once a step, ahead of time, on the script's original optimizer, which steps no
    parameters.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        scheduler: LRScheduler | None,
        names: Mapping[nn.Parameter, str],
        max_grad_norm: float | None,
    ) -> None:
        """`names` are the names of the model's parameters.

        Raises `LoopMisused` for an optimizer of other parameters, and for a scheduler of another
        optimizer.
        """
        if scheduler is not None and scheduler.optimizer is not optimizer:
            raise LoopMisused(
                "run.prepare: the scheduler belongs to another optimizer; build it with the "
                "optimizer that is prepared"
            )
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
        self._refuse_unstepped(names)
        self._rates = [self._rate_now()]

    def build(self, shards: Sequence[tuple[str, Tensor]]) -> Optimizer:
        """An optimizer with the script's parameter groups that have a shard on this worker."""
        members: list[list[Tensor]] = [[] for _ in self._groups]
        for name, shard in shards:
            members[self._group_of[name]].append(shard)
        groups = [
            {NO_PARAMETERS: shards_of_group, **settings}
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

    def rate(self, step: int) -> float:
        """The factor of all learning rates at a step, counted from 1.

        Raises `LoopMisused` for a scheduler that changes more than learning rates, or changes them
        by different factors in different groups.
        """
        while len(self._rates) < step and self._scheduler is not None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # "scheduler before optimizer.step()"
                self._scheduler.step()
            self._rates.append(self._rate_now())
        return self._rates[min(step, len(self._rates)) - 1]

    def _rate_now(self) -> float:
        rates = []
        for group, settings in zip(self._optimizer.param_groups, self._groups, strict=True):
            if not settings[LR]:
                raise LoopMisused(
                    "run.prepare: a group of parameters has learning rate 0; freeze them instead "
                    "(requires_grad_(False))"
                )
            changed = [k for k, v in settings.items() if k != LR and _differ(group[k], v)]
            if changed:
                raise LoopMisused(
                    f"run.prepare: {type(self._scheduler).__name__} also changes {changed[0]}; "
                    "only learning rates can follow a schedule"
                )
            rates.append(float(group[LR]) / float(settings[LR]))
        if max(rates) - min(rates) > 1e-9 * max(map(abs, rates)):
            raise LoopMisused(
                f"run.prepare: {type(self._scheduler).__name__} changes the groups of parameters "
                "by different factors; only one factor for all is supported"
            )
        return rates[0]

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


def _name_of(parameter: nn.Parameter, names: Mapping[nn.Parameter, str]) -> str:
    if parameter not in names:
        raise LoopMisused(
            f"run.prepare: the optimizer has a parameter of shape {tuple(parameter.shape)} that "
            "the model does not have"
        )
    return names[parameter]


def _differ(first: Any, second: Any) -> bool:
    return bool(first != second)
