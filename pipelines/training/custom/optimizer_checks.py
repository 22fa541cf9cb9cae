"""Checks that a custom optimizer can be sharded and resumed, by a trial on small tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from inspect import Parameter, signature, unwrap
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pipelines.errors import UserError
from pipelines.training.workload.optimizer import (
    LocalOptimizer,
    OptimizerFactory,
    is_elementwise,
    kinds_of,
    prepare_trial,
    state_shape,
    state_templates,
)
from pipelines.training.workload.seeds import keyed_generator
from pipelines.training.workload.state import buffers

NUM_STEPS = 2
SHAPE = (4, 3, 2)
"""The first sizes of the trial tensors, whose halves along dims 0 and 1 are stepped, too."""
TOLERANCE = 1e-9
NOT_CUT = (
    "the optimizer's update of an element depends on others of the same parameter (as with Muon, "
    "Adafactor, LAMB), which tp would cut: use dp or fsdp, which deals whole parameters to workers"
)
Weights = dict[str, Tensor]


def refuse_other_state(module: nn.Module) -> None:
    """Raise `UserError` for state of complex numbers, and for state that is no tensor."""
    for part in module.modules():
        if type(part).get_extra_state is not nn.Module.get_extra_state:
            raise UserError(
                f"the model's {type(part).__name__} has get_extra_state(), which a run does not "
                "keep: keep its numbers in a buffer, and delete the method"
            )
    for name, buffer in buffers(module):
        if buffer.is_complex():
            raise UserError(
                f"the model's buffer {name} is complex, which a run cannot keep: give "
                "register_buffer persistent=False, or keep torch.view_as_real of it"
            )
    for name, parameter in module.named_parameters():
        if parameter.is_complex():
            raise UserError(
                f"the model's parameter {name} is complex, which a run cannot shard: make it "
                "torch.view_as_real of it, and use torch.view_as_complex(...) of that in forward"
            )


def refuse_unfit(optimizer_factory: OptimizerFactory, num_dims: Mapping[str, int]) -> None:
    """Try the optimizer on parameters of these names and numbers of dims.

    Raises `UserError` if its step fails, or if its steps differ from those of the run.
    """
    weights, gradients = _trial(optimizer_factory, num_dims)
    plain = _copied(weights)
    optimizer = optimizer_factory.build(list(plain.items()))
    kind = type(optimizer).__name__
    if "closure" in _needed_by(optimizer.step):
        raise UserError(
            f"optimizer {kind}: its step needs a closure, which computes the loss again and again; "
            "a run computes it once a step, so choose another"
        )
    prepare_trial(optimizer)
    numbers = _numbers_of(optimizer)
    try:
        for step_gradients in gradients:
            _step(optimizer, plain, step_gradients)
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"optimizer {kind}: a step on small tensors failed: {reason}") from error
    if changed := sorted(_numbers_of(optimizer).items() ^ numbers.items()):
        raise UserError(
            f"optimizer {kind}: its step changes {changed[0][0][1]} of its groups, which a run "
            "does not keep; choose another"
        )
    if not _alike(plain, _stepped(optimizer_factory, weights, gradients)):
        raise UserError(
            f"optimizer {kind}: its steps with the state that the run keeps differ from its own; "
            "choose another"
        )


def uncut_parameters(
    optimizer_factory: OptimizerFactory, num_dims: Mapping[str, int]
) -> frozenset[str]:
    """Those of the parameters of these names and numbers of dims that no axis may cut, but could.

    The update of an element may depend on others of its parameter, which another worker would hold.
    """
    templates = state_templates(optimizer_factory, num_dims, torch.float64)
    found = {
        name
        for name, template in templates.items()
        for value in template.values()
        if value.ndim and not is_elementwise(value, num_dims[name])
    }
    weights, gradients = _trial(optimizer_factory, num_dims)
    whole = _stepped(optimizer_factory, weights, gradients)
    for dim in range(2):
        cut = [name for name, weight in weights.items() if weight.ndim > dim]
        halves = [
            _stepped(
                optimizer_factory,
                _half(weights, cut, dim, which),
                [_half(step_gradients, cut, dim, which) for step_gradients in gradients],
            )
            for which in range(2)
        ]
        found |= {
            name
            for name in cut
            if not _close(torch.cat([half[name] for half in halves], dim), whole[name])
        }
    kinds = kinds_in(optimizer_factory, num_dims)
    names = {name for kind in kinds if found & set(kind) for name in kind}
    return frozenset(name for name in names if num_dims[name])


def _half(tensors: Weights, cut: Sequence[str], dim: int, which: int) -> Weights:
    """These tensors, of which some are cut in two along a dim."""
    halves = dict(tensors)
    for name in cut:
        halves[name] = tensors[name].tensor_split(2, dim)[which].clone()
    return halves


def why_not_split(optimizer_factory: OptimizerFactory, num_dims: Mapping[str, int]) -> str | None:
    """Why the parameters cannot be on different workers, or None."""
    weights, gradients = _trial(optimizer_factory, num_dims)
    steps = _stepped(optimizer_factory, weights, gradients)
    names = list(weights)
    for changed in (names[::2], names[1::2]):
        others = [
            {name: 3 * gradient if name in changed else gradient for name, gradient in step.items()}
            for step in gradients
        ]
        beside_others = _stepped(optimizer_factory, weights, others)
        if not _alike({name: steps[name] for name in set(names) - set(changed)}, beside_others):
            return (
                "the optimizer's update of a parameter depends on other parameters, so each worker "
                "needs all of them: use dp"
            )
    return None


def _trial(
    optimizer_factory: OptimizerFactory, num_dims: Mapping[str, int]
) -> tuple[Weights, list[Weights]]:
    """Small parameters, two of each kind, and gradients of a few steps."""
    names = [name for kind in kinds_in(optimizer_factory, num_dims) for name in kind[:2]]
    shapes = {name: (*SHAPE, *[2] * num_dims[name])[: num_dims[name]] for name in names}
    gradients = [
        {name: _drawn(f"gradient {step}", name, shape) for name, shape in shapes.items()}
        for step in range(NUM_STEPS)
    ]
    return {name: _drawn("weight", name, shape) for name, shape in shapes.items()}, gradients


def kinds_in(optimizer_factory: OptimizerFactory, num_dims: Mapping[str, int]) -> list[list[str]]:
    """The names of the parameters that the optimizer treats alike."""
    small = {name: torch.zeros([2] * ndim) for name, ndim in num_dims.items()}
    return kinds_of(optimizer_factory.build(list(small.items())), small)


def _needed_by(function: Callable[..., Any]) -> set[str]:
    """The parameters of a function without a default."""
    parameters = signature(unwrap(function)).parameters.values()
    return {
        p.name for p in parameters if p.default is Parameter.empty and p.kind is not p.VAR_KEYWORD
    }


def _stepped(
    optimizer_factory: OptimizerFactory, weights: Weights, gradients: list[Weights]
) -> Weights:
    shards = _copied(weights)
    num_dims = {name: shard.ndim for name, shard in shards.items()}
    templates = state_templates(optimizer_factory, num_dims, torch.float64)
    state = {
        name: {
            key: torch.zeros(state_shape(value, shards[name].shape), dtype=value.dtype)
            for key, value in template.items()
        }
        for name, template in templates.items()
    }
    for step_gradients in gradients:  # each in another generation, whose optimizer is another
        optimizer = LocalOptimizer(optimizer_factory, shards, state)
        prepare_trial(optimizer.optimizer)
        optimizer.step(_copied(step_gradients))  # a step may change them
        live = optimizer.state()
        for name, own in state.items():
            for key, value in own.items():
                if live[name][key] is not value:
                    raise UserError(
                        f"optimizer {type(optimizer.optimizer).__name__}: its step replaces {key} "
                        "instead of changing it, so that copies miss the change; choose another"
                    )
    return shards


def _numbers_of(optimizer: Optimizer) -> dict[tuple[int, str], str]:
    """The hyperparameters of each group."""
    return {
        (number, key): repr(value)
        for number, group in enumerate(optimizer.param_groups)
        for key, value in group.items()
        if key != "params"
    }


@torch.no_grad()
def _step(optimizer: Optimizer, weights: Weights, gradients: Weights) -> None:
    for name, weight in weights.items():
        weight.grad = gradients[name].clone()
    optimizer.step()


def _alike(first: Weights, second: Weights) -> bool:
    return all(_close(first[name], second[name]) for name in first)


def _close(first: Tensor, second: Tensor) -> bool:
    return torch.allclose(first, second, rtol=TOLERANCE, atol=TOLERANCE)


def _copied(weights: Weights) -> Weights:
    return {name: weight.clone() for name, weight in weights.items()}


def _drawn(what: str, name: str, shape: tuple[int, ...]) -> Tensor:
    generator = keyed_generator("optimizer check", what, name)
    return torch.randn(shape, dtype=torch.float64, generator=generator)
