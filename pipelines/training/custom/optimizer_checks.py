"""Whether a user's own optimizer can be elastic: tried on small tensors, once, beforehand."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.optim import Optimizer

from pipelines.settings.errors import UserError
from pipelines.training.workload.optimizer import LocalOptimizer, Optimizing, state_templates
from pipelines.training.workload.seeds import keyed_generator

NUM_STEPS = 2
SHAPE = (4, 3, 2)
"""The first dims of what is stepped; halves of the first are stepped apart."""
TOLERANCE = 1e-9
Weights = dict[str, Tensor]


def refuse_unfit(optimising: Optimizing, num_dims: Mapping[str, int]) -> None:
    """Try it on parameters of these names and numbers of dims.

    Raises `UserError` for one whose state cannot begin at 0, or that does to an element what
    depends on others, of which another worker may have some.
    """
    shapes = {name: (*SHAPE, *[2] * ndim)[:ndim] for name, ndim in num_dims.items()}
    weights = {name: _drawn("weight", name, shape) for name, shape in shapes.items()}
    gradients = [
        {name: _drawn(f"gradient {step}", name, shape) for name, shape in shapes.items()}
        for step in range(NUM_STEPS)
    ]
    plain = _copied(weights)
    optimizer = optimising.build(list(plain.items()))
    kind = type(optimizer).__name__
    for given in gradients:
        _step(optimizer, plain, given)
    from_zeros = _stepped(optimising, weights, gradients)
    if not _alike(plain, from_zeros):
        raise UserError(
            f"optimizer {kind}: its first step differs from one with a state of zeros, with which "
            "every state begins here (SGD with dampening, NAdam); choose another"
        )
    cut = {name: shape[0] // 2 for name, shape in shapes.items() if shape}
    halves = [
        _stepped(
            optimising,
            {name: weights[name][part(number)] for name, number in cut.items()},
            [{name: one[name][part(number)] for name, number in cut.items()} for one in gradients],
        )
        for part in (lambda n: slice(0, n), lambda n: slice(n, None))
    ]
    together = {name: torch.cat([half[name] for half in halves]) for name in cut}
    if not _alike({name: from_zeros[name] for name in cut}, together):
        raise UserError(
            f"optimizer {kind}: what it does to an element depends on others of the same parameter "
            "(as LARS, LAMB, Muon and Adafactor do), which `fsdp` may divide; choose another"
        )


def _stepped(optimising: Optimizing, weights: Weights, gradients: list[Weights]) -> Weights:
    shards = _copied(weights)
    num_dims = {name: shard.ndim for name, shard in shards.items()}
    templates = state_templates(optimising, num_dims, torch.float64)
    state = {
        name: {
            key: torch.zeros(shards[name].shape if value.ndim else (), dtype=value.dtype)
            for key, value in template.items()
        }
        for name, template in templates.items()
    }
    optimizer = LocalOptimizer(optimising, shards, state)
    for given in gradients:
        optimizer.step(given, 1.0)
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
