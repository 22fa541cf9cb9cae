"""The samples that a rank of a peer reads: those of our run."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import torch.distributed as dist

from pipelines.settings.recipe import Recipe
from pipelines.training.workload.sample_order import samples_of

STEPS_DRAWN = 32
"""Samples are drawn for several steps at once, as a loop that saves time would."""


def own_samples(recipe: Recipe, num_samples: int) -> Iterator[list[int]]:
    """This rank's samples of each step, without end."""
    settings, size = recipe.settings, recipe.settings.batch // dist.get_world_size()
    for first in count(step=STEPS_DRAWN):
        begins = [
            step * settings.batch + dist.get_rank() * size
            for step in range(first, first + STEPS_DRAWN)
        ]
        ids = [begin + i for begin in begins for i in range(size)]
        drawn = samples_of(settings.seed, ids, num_samples)
        yield from (drawn[i : i + size] for i in range(0, len(drawn), size))
