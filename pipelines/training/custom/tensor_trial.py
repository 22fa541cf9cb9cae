"""Trial of a recipe's plan before a run: its module must run with the layers of one `tp` rank."""

from __future__ import annotations

import sys
from typing import Protocol

import torch
from torch import nn

from pipelines.errors import UserError, first_line
from pipelines.training.custom.merge_trial import (
    MAX_PARAMETERS,
    NOISE,
    MergeCandidate,
    draws_at_random,
)
from pipelines.training.custom.modules.custom_module import (
    build_on_host,
    count_parameters,
    seeded,
)
from pipelines.training.custom.modules.custom_pipeline import CustomBatch
from pipelines.training.custom.modules.loss_sums import loss_sums_of
from pipelines.training.tensor.draw_trial import find_draws, for_trial
from pipelines.training.tensor.sharded_draws import Unknown
from pipelines.training.tensor.value_trial import Untried, refuse_other_values
from pipelines.training.workload.seeds import keyed_generator
from pipelines.training.workload.state import in_stored_dtype, stored_dtype
from pipelines.training.workload.trees import mapped
from pipelines.training.workload.workload import ModelShape

NUM_SAMPLES = 2


class TensorCandidate(MergeCandidate, Protocol):
    """A custom workload, as the trial sees it."""

    def example(self, num_samples: int) -> CustomBatch: ...


def why_no_tensor_parallelism(candidate: TensorCandidate, shape: ModelShape) -> str | None:
    """The reason why the module cannot be trained under `tp`, or None.

    It runs twice on the meta device, where only shapes are known; a recipe that does not run there
    is refused if it draws random numbers. Then it runs with values, whole and on virtual ranks.
    """
    recipe, settings = candidate.recipe, candidate.settings
    divides = shape.limits.tp_divides or 2
    num_tp = next((tp for tp in range(2, divides + 1) if divides % tp == 0), None)
    if num_tp is None:
        return None
    try:
        with seeded(settings.seed):
            batch = candidate.example(min(NUM_SAMPLES, settings.microbatch))
            value = mapped(lambda tensor: tensor.to("meta"), batch.value)
            whole, cut = (
                for_trial(candidate.module(), getattr(torch, settings.dtype)) for _ in range(2)
            )
            draws = find_draws(whole, cut, shape, num_tp, lambda module: recipe.loss(module, value))
    except Unknown as unknown:
        if draws_at_random(candidate):
            return str(unknown)
        draws = []
    except UserError as error:
        return str(error)
    if any(draws) and settings.compile:
        return "dropout of activations that tp shards needs compile=false"
    return _why_other_values(candidate, shape, num_tp)


def _why_other_values(candidate: TensorCandidate, shape: ModelShape, num_tp: int) -> str | None:
    """The reason why sharded layers compute something else than the whole module, or None.

    Without a trial with values one line says so.
    """
    recipe, settings = candidate.recipe, candidate.settings
    num_parameters = count_parameters(candidate.module())
    try:
        if num_parameters > MAX_PARAMETERS:
            raise Untried(f"the module has {num_parameters:,} parameters, over {MAX_PARAMETERS:,}")
        with seeded(settings.seed):
            batch = candidate.example(min(NUM_SAMPLES, settings.microbatch))
            modules = [_with_noise(candidate) for _ in range(1 + num_tp)]
            dtype = stored_dtype(settings)
            value = mapped(lambda t: t.to(dtype) if t.is_floating_point() else t, batch.value)
            refuse_other_values(
                modules,
                shape,
                lambda module: loss_sums_of(recipe.loss(module, value), batch.num_held).loss,
            )
    except UserError as error:
        return str(error)
    except Exception as error:  # a module that needs a GPU, for example
        kind = "" if isinstance(error, Untried) else f"{type(error).__name__}: "
        reason = kind + first_line(error)
        print(f"elastic: tp was tried out with shapes, not with values: {reason}", file=sys.stderr)
    return None


def _with_noise(candidate: TensorCandidate) -> nn.Module:
    """The module on the host; each time with the same noise on its parameters, since a parameter of
    value 0 would hide differences."""
    settings = candidate.settings
    module = build_on_host(candidate.recipe.model, settings.seed)
    in_stored_dtype(module, settings).train()
    generator = keyed_generator("noise", settings.seed)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.is_floating_point():
                noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
                parameter.add_(NOISE * noise)
    return module
