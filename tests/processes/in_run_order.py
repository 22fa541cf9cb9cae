"""Runs a plain script, whose samplers have the sample order of a run: in_run_order.py SCRIPT.

So the losses of the script and of the run can be compared. Nothing else of the script is changed.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DistributedSampler, RandomSampler

from elastic.geometry.sample_order import sample_of

SEED = 0


def order_of(epoch: int, num_samples: int) -> list[int]:
    first = epoch * num_samples
    return [sample_of(SEED, first + index, num_samples) for index in range(num_samples)]


def random_order(sampler: Any) -> Iterator[int]:
    """The next epoch of a sampler each time that it is iterated."""
    sampler.num_epochs = getattr(sampler, "num_epochs", -1) + 1
    return iter(order_of(sampler.num_epochs, len(sampler.data_source)))


def distributed_order(sampler: Any) -> Iterator[int]:
    """The part of one rank; the ranks' batches together are the batch of a step."""
    order = order_of(sampler.epoch, len(sampler.dataset))
    return iter(order[sampler.rank :: sampler.num_replicas])


if __name__ == "__main__":
    RandomSampler.__iter__ = random_order
    DistributedSampler.__iter__ = distributed_order
    runpy.run_path(sys.argv[1], run_name="__main__")
