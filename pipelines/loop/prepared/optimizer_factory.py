"""A script's optimizers, adapted so that the run steps them on any shards."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from actors.distributed.torch_private import has_step_hook
from pipelines.loop.modules.module_numbers import ModuleNumbers
from pipelines.loop.prepared.joined_optimizer import JoinedOptimizer
from pipelines.loop.state.errors import LoopMisused
from pipelines.loop.state.kept_objects import KeptObjects
from pipelines.loop.state.loss_scaler import LossScaler
from pipelines.loop.state.script_state import ScriptState
from pipelines.loop.state.script_values import PARAMETERS, ScriptValues
from pipelines.training.workload.clipping import Clipping
from pipelines.training.workload.optimizer import BEGUN
from pipelines.training.workload.state import OPTIMIZER

NUMBER = "script_group"
"""The key of a group's number among the script's groups."""


class ScriptOptimizerFactory:
    """A script's optimizers as one `OptimizerFactory`.

    See `pipelines.training.workload.optimizer.OptimizerFactory`. For each set of shards new
    optimizers are built as unpickling builds them, so any optimizer class works. Their groups have
    the hyperparameters that the script gives them, by hand or by schedulers; see `ScriptValues`.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        schedulers: Sequence[LRScheduler],
        names: Mapping[nn.Parameter, str],
        clipping: Clipping,
        scaler: LossScaler | None = None,
        kept: KeptObjects | None = None,
        modules: ModuleNumbers | None = None,
    ) -> None:
        """`names` are the names of the model's parameters.

        Raises `LoopMisused` for an optimizer of other parameters, and for a scheduler of another
        optimizer or one that the run does not know.
        """
        _refuse_foreign(optimizers, schedulers)
        self._declared_clipping = clipping
        self.values = ScriptValues(optimizers, schedulers, scaler)
        self.state = ScriptState(self.values, kept or KeptObjects(), modules)
        self._optimizers = optimizers
        self._names = names
        groups = [(owner, group) for owner in optimizers for group in owner.param_groups]
        self._groups = [
            (owner, {k: v for k, v in group.items() if k != PARAMETERS} | {NUMBER: number})
            for number, (owner, group) in enumerate(groups)
        ]
        self._attributes = {name: vars(parameter) for parameter, name in names.items()}
        self._group_of: dict[str, int] = {}
        for number, (_, group) in enumerate(groups):
            for parameter in group[PARAMETERS]:
                self._add(_name_of(parameter, names), number)
        self._made = {
            _name_of(parameter, names): _makers(optimizer, parameter)
            for optimizer in optimizers
            for parameter in list(optimizer.state)
            if isinstance(parameter, nn.Parameter)
        }
        """How to make the state that the optimizer's constructor made, for each parameter."""
        self._refuse_unstepped(names)

    @property
    def script_state(self) -> Mapping[str, Tensor]:
        return self.state.initial

    @property
    def clipping(self) -> Clipping:
        """That of the present step, or of all steps."""
        return self.values.clipping or self._declared_clipping

    def clip(self, clipping: Clipping) -> None:
        """Clip the gradients of the present step. Raises `LoopMisused` if those of all steps are
        clipped already."""
        if self._declared_clipping != Clipping():
            raise LoopMisused(
                "clip_grad_norm_: the loop was given max_grad_norm or max_grad_value, too: keep "
                "one of them"
            )
        self.values.clip(clipping)

    def build(self, shards: Sequence[tuple[str, Tensor]]) -> Optimizer:
        """An optimizer with the script's parameter groups that have a shard on this worker."""
        members: list[list[Tensor]] = [[] for _ in self._groups]
        for name, shard in shards:
            vars(shard).update(self._attributes[name])
            members[self._group_of[name]].append(shard)
        built = []
        for optimizer in self._optimizers:
            groups = [
                {PARAMETERS: shards_of_group, **settings}
                for shards_of_group, (owner, settings) in zip(members, self._groups, strict=True)
                if shards_of_group and owner is optimizer
            ]
            if groups:
                built.append(_built_like(optimizer, groups))
        whole = built[0] if len(built) == 1 else JoinedOptimizer(built)
        for name, shard in shards:
            if name in self._made:
                whole.state[shard] = {key: make(shard) for key, make in self._made[name].items()}
        return whole

    def schedule(self, step: int, groups: Sequence[dict[str, Any]]) -> None:
        """Give the groups what the script's groups had when the script would have stepped."""
        taken = self.values.taken()
        for group in groups:
            group |= taken[group[NUMBER]]

    def state_dict(self, optimizer: Optimizer, whole: Mapping[str, Tensor]) -> dict[str, Any]:
        """What torch's `state_dict` of the script's optimizer would be, with the `whole` tensors of
        the optimizer state by their names in the run."""
        packed: dict[str, Any] = optimizer.state_dict()
        by_parameter: dict[str, dict[str, Tensor]] = {}
        for name, value in whole.items():
            parameter_name, _, key = name.removeprefix(OPTIMIZER).rpartition(".")
            by_parameter.setdefault(parameter_name, {})[key] = value
        state = {}
        for group, named in zip(optimizer.param_groups, packed["param_groups"], strict=True):
            for parameter, number in zip(group[PARAMETERS], named[PARAMETERS], strict=True):
                of_parameter = by_parameter.get(self._names[parameter], {})
                begun = of_parameter.pop(BEGUN, None)
                if of_parameter and (begun is None or begun):
                    state[number] = {
                        key: value.reshape(()) if value.shape == (1,) != parameter.shape else value
                        for key, value in of_parameter.items()
                    }
        return packed | {"state": state}

    @property
    def all_step(self) -> bool:
        """Whether the script steps all of its optimizers in the present step."""
        return len(self.values.stepped) == len(self._optimizers)

    def is_stepped(self, name: str) -> bool:
        """Whether the script steps the optimizer of a parameter in the present step, if it has
        one."""
        if name not in self._group_of:
            return True  # frozen
        owner, _ = self._groups[self._group_of[name]]
        return self._optimizers.index(owner) in self.values.stepped

    def _add(self, name: str, number: int) -> None:
        if name in self._group_of:
            raise LoopMisused(f"run.prepare: two optimizers, or groups, have parameter {name}")
        self._group_of[name] = number

    def _refuse_unstepped(self, names: Mapping[nn.Parameter, str]) -> None:
        missing = [
            name
            for parameter, name in names.items()
            if parameter.requires_grad and name not in self._group_of
        ]
        if missing:
            raise LoopMisused(
                f"run.prepare: the optimizer lacks parameter {missing[0]}: give it all of the "
                "model's, or freeze the others (requires_grad_(False)); a model that the script "
                "updates itself goes to run.keep"
            )


class LoopOptimizerFactory:
    """The optimizer factory of a loop's present script, which a restart replaces."""

    def __init__(self, present: Callable[[], ScriptOptimizerFactory]) -> None:
        self._present = present

    @property
    def clipping(self) -> Clipping:
        return self._present().clipping

    @property
    def script_state(self) -> Mapping[str, Tensor]:
        return self._present().script_state

    def build(self, shards: Sequence[tuple[str, Tensor]]) -> Optimizer:
        return self._present().build(shards)

    def schedule(self, step: int, groups: Sequence[dict[str, Any]]) -> None:
        self._present().schedule(step, groups)


def _built_like(optimizer: Optimizer, groups: list[dict[str, Any]]) -> Optimizer:
    built: Optimizer = object.__new__(type(optimizer))
    built.__setstate__(
        {
            "defaults": dict(optimizer.defaults),
            "state": defaultdict(dict),
            "param_groups": groups,
        }
    )
    return built


def _refuse_foreign(optimizers: Sequence[Optimizer], schedulers: Sequence[LRScheduler]) -> None:
    if any(scheduler.optimizer not in optimizers for scheduler in schedulers):
        raise LoopMisused(
            "run.prepare: the scheduler belongs to another optimizer; build it with the "
            "optimizer that is prepared"
        )
    # A scheduler wraps the `step` of its optimizer.
    scheduled = [scheduler.optimizer for scheduler in schedulers]
    if any("step" in vars(optimizer) and optimizer not in scheduled for optimizer in optimizers):
        raise LoopMisused(
            "run.prepare: the optimizer has a learning-rate scheduler; pass it, too, so that its "
            "state survives a change of the workers"
        )
    if any(map(has_step_hook, optimizers)):
        raise LoopMisused(
            "run.prepare: the optimizer has a hook on its step, which the run would not call, as "
            "a worker steps only its shards: clip gradients with run.steps(..., max_grad_norm=...) "
            "or max_grad_value=..., and do what else the hook does between two steps"
        )


def _name_of(parameter: nn.Parameter, names: Mapping[nn.Parameter, str]) -> str:
    if parameter not in names:
        raise LoopMisused(
            f"run.prepare: the optimizer has a parameter of shape {tuple(parameter.shape)} that "
            "the model does not have"
        )
    return names[parameter]


def _makers(optimizer: Optimizer, parameter: nn.Parameter) -> dict[str, Callable[[Tensor], Any]]:
    """How to make each state of a parameter for a shard of it: state of its shape has one value.

    Raises `LoopMisused` for an optimizer that has stepped, or has other state.
    """
    makers: dict[str, Callable[[Tensor], Any]] = {}
    for key, value in optimizer.state[parameter].items():
        if not isinstance(value, Tensor) or not value.ndim or not value.numel():
            makers[key] = partial(_copied, value)
        elif bool((value == value.flatten()[0]).all()):
            # State in the parameter's dtype is kept in that in which the run stores the parameter.
            dtype = None if value.dtype == parameter.dtype else value.dtype
            number = value.flatten()[0].item()
            makers[key] = partial(torch.full_like, fill_value=number, dtype=dtype)
        else:
            raise LoopMisused(
                f"run.prepare: the optimizer {type(optimizer).__name__} has stepped before the "
                f"loop (its {key} has several values), which no other worker knows of; prepare a "
                "new one"
            )
    return makers


def _copied(value: Any, _: Tensor) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
