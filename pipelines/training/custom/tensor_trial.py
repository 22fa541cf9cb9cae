"""Trial of a recipe's plan before a run: its module must run with the layers of one `tp` rank."""

from __future__ import annotations

from typing import Protocol

import torch

from pipelines.errors import UserError
from pipelines.training.custom.custom_module import seeded
from pipelines.training.custom.custom_pipeline import CustomBatch
from pipelines.training.custom.merge_trial import MergeCandidate, draws_at_random
from pipelines.training.tensor.draw_trial import find_draws, for_trial
from pipelines.training.tensor.sharded_draws import Unknown
from pipelines.training.workload.trees import mapped
from pipelines.training.workload.workload import ModelShape

NUM_SAMPLES = 2


class TensorCandidate(MergeCandidate, Protocol):
    """A custom workload, as the trial sees it."""

    def example(self, num_samples: int) -> CustomBatch: ...


def why_no_tensor_parallelism(candidate: TensorCandidate, shape: ModelShape) -> str | None:
    """The reason why the module cannot be trained under `tp`, or None.

    It runs twice on the meta device, where only shapes are known; a recipe that does not run there
    is refused if it draws random numbers.
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
        return str(unknown) if draws_at_random(candidate) else None
    except UserError as error:
        return str(error)
    if any(draws) and settings.compile:
        return "dropout of activations that tp shards needs compile=false"
    return None
