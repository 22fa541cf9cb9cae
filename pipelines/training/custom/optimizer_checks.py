"""Checks that a custom optimizer can be sharded and resumed, by a trial on small tensors."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.optim import Optimizer

from pipelines.errors import UserError
from pipelines.training.workload.optimizer import LocalOptimizer, OptimizerFactory, state_templates
from pipelines.training.workload.seeds import keyed_generator

NUM_STEPS = 2
SHAPE = (4, 3, 2)
"""The first sizes of the trial tensors, whose halves along dim 0 are also stepped separately."""
TOLERANCE = 1e-9
Weights = dict[str, Tensor]


def refuse_unfit(optimizer_factory: OptimizerFactory, num_dims: Mapping[str, int]) -> None:
    """Try the optimizer on parameters of these names and numbers of dims.

    Raises `UserError` if its state cannot start at 0, or if its update of an element depends on
    other elements, which another worker may hold.
    """
    shapes = {name: (*SHAPE, *[2] * ndim)[:ndim] for name, ndim in num_dims.items()}
    weights = {name: _drawn("weight", name, shape) for name, shape in shapes.items()}
    gradients = [
        {name: _drawn(f"gradient {step}", name, shape) for name, shape in shapes.items()}
        for step in range(NUM_STEPS)
    ]
    plain = _copied(weights)
    optimizer = optimizer_factory.build(list(plain.items()))
    kind = type(optimizer).__name__
    for step_gradients in gradients:
        _step(optimizer, plain, step_gradients)
    from_zeros = _stepped(optimizer_factory, weights, gradients)
    if not _alike(plain, from_zeros):
        raise UserError(
            f"optimizer {kind}: its first step differs from a step with a state of zeros, which is "
            "every run's initial state (as with SGD with dampening, NAdam); choose another"
        )
    sizes = {name: shape[0] // 2 for name, shape in shapes.items() if shape}
    halves = [
        _stepped(
            optimizer_factory,
            {name: weights[name][half(size)] for name, size in sizes.items()},
            [{name: step[name][half(size)] for name, size in sizes.items()} for step in gradients],
        )
        for half in (lambda n: slice(0, n), lambda n: slice(n, None))
    ]
    together = {name: torch.cat([half[name] for half in halves]) for name in sizes}
    if not _alike({name: from_zeros[name] for name in sizes}, together):
        raise UserError(
            f"optimizer {kind}: its update of an element depends on others of the same parameter "
            "(as with LARS, LAMB, Muon, Adafactor), which `fsdp` may shard; choose another"
        )


def _stepped(
    optimizer_factory: OptimizerFactory, weights: Weights, gradients: list[Weights]
) -> Weights:
    shards = _copied(weights)
    num_dims = {name: shard.ndim for name, shard in shards.items()}
    templates = state_templates(optimizer_factory, num_dims, torch.float64)
    state = {
        name: {
            key: torch.zeros(shards[name].shape if value.ndim else (), dtype=value.dtype)
            for key, value in template.items()
        }
        for name, template in templates.items()
    }
    optimizer = LocalOptimizer(optimizer_factory, shards, state)
    for step_gradients in gradients:
        optimizer.step(step_gradients)
    return shards


@torch.no_grad()
def _step(optimizer: Optimizer, weights: Weights, gradients: Weights) -> None:
    for name, weight in weights.items():
        weight.grad = gradients[name]
    optimizer.step()


def _alike(first: Weights, second: Weights) -> bool:
    return all(torch.allclose(first[n], second[n], rtol=TOLERANCE, atol=TOLERANCE) for n in first)


def _copied(weights: Weights) -> Weights:
    return {name: weight.clone() for name, weight in weights.items()}


def _drawn(what: str, name: str, shape: tuple[int, ...]) -> Tensor:
    generator = keyed_generator("optimizer check", what, name)
    return torch.randn(shape, dtype=torch.float64, generator=generator)
