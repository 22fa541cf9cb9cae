"""The optimizer over local shards; its step runs no collective."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer

from pipelines.errors import UserError
from pipelines.settings import OptimizerSettings
from pipelines.training.workload.clipping import Clipping


class OptimizerFactory(Protocol):
    """An optimizer and its learning rate schedule, the same for every shard of every layout."""

    @property
    def clipping(self) -> Clipping:
        """How gradients are clipped before a step."""

    def build(self, shards: Sequence[tuple[str, Tensor]]) -> Optimizer:
        """Build an optimizer over named shards of parameters.

        The update of an element may depend only on that element and on the parameter's name and
        number of dims.
        """

    def schedule(self, step: int, groups: Sequence[dict[str, Any]]) -> None:
        """Set the hyperparameters that a built optimizer's groups have at a step, counted from 1.

        `INITIAL_LR` is the learning rate with which a group was built.
        """

    @property
    def script_state(self) -> Mapping[str, Tensor]:
        """At step 0, what a script may change between steps: it is part of the state, replicated.

        Empty if there is no script.
        """


INITIAL_LR = "initial_lr"
TRIAL_RATE = 0.1
BEGUN = "begun"
"""The key of an optimizer state of shape (): whether the parameter has been stepped. Only for
optimizers whose first step is not that of a state of zeros, such as NAdam."""


def scale_rates(groups: Sequence[dict[str, Any]], rate: float) -> None:
    """Set each group's learning rate to its initial one times `rate`."""
    for group in groups:
        group["lr"] = group[INITIAL_LR] * rate


class AdamWBySettings:
    """AdamW from a run's settings, with weight decay on matrices only. See `OptimizerFactory`."""

    script_state: Mapping[str, Tensor] = MappingProxyType({})

    def __init__(self, settings: OptimizerSettings) -> None:
        self.settings = settings
        self.clipping = Clipping(settings.max_grad_norm)

    def build(self, shards: Sequence[tuple[str, Tensor]]) -> Optimizer:
        settings = self.settings
        groups: list[dict[str, Any]] = [
            {"params": [shard for _, shard in shards if shard.ndim > 1]},
            {"params": [shard for _, shard in shards if shard.ndim <= 1], "weight_decay": 0.0},
        ]
        return AdamW(
            [group for group in groups if group["params"]],
            lr=settings.lr,
            betas=(settings.beta1, settings.beta2),
            eps=settings.eps,
            weight_decay=settings.weight_decay,
            fused=True,
        )

    def schedule(self, step: int, groups: Sequence[dict[str, Any]]) -> None:
        scale_rates(groups, rate_of(self.settings, step))


def rate_of(settings: OptimizerSettings, step: int) -> float:
    """The learning rate of a step, counted from 1, as a fraction of the peak: linear warm-up, then
    a cosine down to `min_lr_ratio`.

    Loshchilov and Hutter, SGDR, 2017.
    """
    if step <= settings.warmup_steps:
        return step / settings.warmup_steps
    if not settings.decay_steps:
        return 1.0
    span = max(1, settings.decay_steps - settings.warmup_steps)
    done = min(1.0, (step - settings.warmup_steps) / span)
    cosine = (1 + math.cos(math.pi * done)) / 2
    return settings.min_lr_ratio + (1 - settings.min_lr_ratio) * cosine


def learning_rate(settings: OptimizerSettings, step: int) -> float:
    """The learning rate of a step; see `rate_of`."""
    return settings.lr * rate_of(settings, step)


def state_templates(
    optimizer_factory: OptimizerFactory, num_dims: Mapping[str, int], dtype: torch.dtype
) -> dict[str, dict[str, Tensor]]:
    """The optimizer state of parameters of these names and numbers of dims.

    Steps small parameters of shape (2, 3, ...) once. State of the parameter's shape holds a value
    for each element; state of shape () holds one for the parameter. Each size of other state is 1,
    as of a sum, or that of a dim of the parameter, as of a preconditioner; see `state_shape`. Where
    the optimizer does not begin with zeros, `BEGUN` is part of it. Raises `UserError` for an
    optimizer with other state.
    """
    optimizer, small = _stepped_once(optimizer_factory, num_dims, dtype)
    templates = {
        name: {key: value for key, value in optimizer.state[weight].items() if value is not None}
        for name, weight in small.items()
    }
    for name, template in templates.items():
        for key, value in template.items():
            _refuse_other_state(optimizer, name, key, value, small[name].shape)
    kinds = kinds_of(optimizer, small)
    some = {names[0]: num_dims[names[0]] for names in kinds}
    for names in kinds:
        first = names[0]
        stepped = {first: small[first], **templates[first]}
        if not _begins_with_zeros(optimizer_factory, some, first, stepped):
            for name in names:
                templates[name][BEGUN] = torch.zeros(())
    return templates


def _begins_with_zeros(
    factory: OptimizerFactory, num_dims: Mapping[str, int], name: str, stepped: Mapping[str, Tensor]
) -> bool:
    """Whether a first step from a state of zeros makes the same parameter, and state by its keys,
    as the optimizer's own first step."""
    zeros = {key: torch.zeros_like(value) for key, value in stepped.items() if key != name}
    dtype = stepped[name].dtype
    try:
        optimizer, small = _stepped_once(factory, num_dims, dtype, {name: zeros})
    except Exception:  # zeros may not be a state at all, as for a matrix that is inverted
        return False
    from_zeros = {name: small[name], **optimizer.state[small[name]]}
    return all(torch.equal(value, from_zeros[key]) for key, value in stepped.items())


def _stepped_once(
    factory: OptimizerFactory,
    num_dims: Mapping[str, int],
    dtype: torch.dtype,
    states: Mapping[str, dict[str, Tensor]] = MappingProxyType({}),
) -> tuple[Optimizer, dict[str, Tensor]]:
    """An optimizer after one step of small parameters with gradients of 1. It begins with its own
    state, or for some parameters with these."""
    small = {name: torch.ones(_trial_shape(ndim), dtype=dtype) for name, ndim in num_dims.items()}
    optimizer = factory.build(list(small.items()))
    prepare_trial(optimizer)
    for name, weight in small.items():
        weight.grad = torch.ones_like(weight)
        if name in states:
            optimizer.state[weight] = dict(states[name])
    optimizer.step()
    return optimizer, small


def prepare_trial(optimizer: Optimizer) -> None:
    """Let a trial step change parameters on the CPU: a schedule may begin with a rate of 0.

    Raises `UserError` for groups without a learning rate.
    """
    for group in optimizer.param_groups:
        if "lr" not in group:
            raise UserError(
                f"optimizer {type(optimizer).__name__}: its groups have no lr, which a run "
                "schedules and logs"
            )
        rate = group["lr"]
        group["lr"] = torch.full_like(rate, TRIAL_RATE) if isinstance(rate, Tensor) else TRIAL_RATE
        if "capturable" in group:
            group["capturable"] = False  # for GPUs alone


def kinds_of(optimizer: Optimizer, small: Mapping[str, Tensor]) -> list[list[str]]:
    """The names of the parameters of each number of dims in each group."""
    group_of = {
        parameter: number
        for number, group in enumerate(optimizer.param_groups)
        for parameter in group["params"]
    }
    kinds: dict[tuple[int, int], list[str]] = {}
    for name, weight in small.items():
        kinds.setdefault((group_of[weight], weight.ndim), []).append(name)
    return list(kinds.values())


def _refuse_other_state(
    optimizer: Optimizer, name: str, key: str, value: object, shape: torch.Size
) -> None:
    kind = type(optimizer).__name__
    if not isinstance(value, Tensor):
        raise UserError(
            f"optimizer {kind}: keeps {key} of {name} as {type(value).__name__}: optimizer state "
            "must be tensors"
        )
    if any(size not in (1, *shape) for size in value.shape):
        raise UserError(
            f"optimizer {kind}: keeps {key} of shape {tuple(value.shape)} for a parameter of "
            f"shape {tuple(shape)}: only state whose sizes are 1 or sizes of the parameter, or of "
            "shape (), can be resharded"
        )


def state_shape(template: Tensor, shape: Sequence[int]) -> tuple[int, ...]:
    """The shape of an optimizer state for a parameter of this shape, by its template."""
    return tuple(1 if size == 1 else shape[_dim_of(size)] for size in template.shape)


def is_elementwise(template: Tensor, ndim: int) -> bool:
    """Whether the state of a parameter of `ndim` dims has its shape, so that it is sharded as it
    is."""
    return bool(ndim) and tuple(template.shape) == _trial_shape(ndim)


def _trial_shape(ndim: int) -> tuple[int, ...]:
    """The shape of a small parameter: its sizes differ, so that state shows which it has."""
    return tuple(range(2, 2 + ndim))


def _dim_of(size: int) -> int:
    """The dim of a small parameter that has this size."""
    return size - 2


class LocalOptimizer:
    """Steps the shards of one rank as plain tensors.

    With DTensors, `step()` would run collectives for parameters that an axis replicates. The
    plain tensors share memory with the DTensors.
    """

    def __init__(
        self,
        optimizer_factory: OptimizerFactory,
        shards: Mapping[str, Tensor],
        state: Mapping[str, dict[str, Tensor]],
    ) -> None:
        """Take the local shards, and the state of each by the keys of `state_templates`.

        A state that has not begun is filled by the shard's first step. A shard without a state is
        another rank's, and gets no gradients.
        """
        self.shards = dict(shards)
        self._waiting: dict[str, dict[str, Tensor]] = {}
        """The state of the shards that have not begun, by name."""
        self._stateful = [name for name in shards if name in state]
        self._begun = {name: state[name][BEGUN] for name in self._stateful if BEGUN in state[name]}
        self._factory = optimizer_factory
        self.optimizer = optimizer_factory.build(list(shards.items()))
        for group in self.optimizer.param_groups:
            group.setdefault(INITIAL_LR, float(group["lr"]))
        for name in self._stateful:
            shard = shards[name]
            own = {key: value for key, value in state[name].items() if key != BEGUN}
            begun = self._begun.get(name)
            if begun is not None and not begun.is_meta and not begun:
                self._waiting[name] = own
            else:
                self.optimizer.state[shard] = own

    def state(self) -> dict[str, dict[str, Tensor]]:
        """The live optimizer state of each shard that has one."""
        live = {}
        for name in self._stateful:
            own = self._waiting.get(name) or self.optimizer.state[self.shards[name]]
            begun = {BEGUN: self._begun[name]} if name in self._begun else {}
            live[name] = {**own, **begun}
        return live

    def schedule(self, step: int) -> float:
        """Set the hyperparameters of a step, counted from 1.

        Returns the first group's learning rate, or one that is not finite if there is any.
        """
        groups = self.optimizer.param_groups
        self._factory.schedule(step, groups)
        rates = [float(group["lr"]) for group in groups]
        return next((rate for rate in rates if not math.isfinite(rate)), rates[0])

    @torch.no_grad()
    def step(self, gradients: Mapping[str, Tensor]) -> None:
        """Step with these gradients. A shard without a gradient does not change."""
        for name, gradient in gradients.items():
            self.shards[name].grad = gradient
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        for name in self._waiting.keys() & gradients.keys():
            self._begin(name)

    def _begin(self, name: str) -> None:
        """Take the state that the optimizer has made for a shard in its first step."""
        own, made = self._waiting.pop(name), self.optimizer.state[self.shards[name]]
        for key, value in own.items():
            value.copy_(made[key])
        made.update(own)
        self._begun[name].fill_(1.0)
