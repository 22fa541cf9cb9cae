"""Layers dealt to pipeline stages by cost, in order, and the rank that each stage lies on."""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate, pairwise

from elastic.geometry.errors import InvalidLayout


@lru_cache(maxsize=256)
def deal_layers(costs: tuple[int, ...], num_stages: int) -> tuple[range, ...]:
    """The layers of each stage: contiguous, none empty, the costliest as cheap as can be.

    Among deals with the same costliest stage, each stage takes about its share of what is
    left. Raises `InvalidLayout` if there are fewer layers than stages.
    """
    if len(costs) < num_stages:
        raise InvalidLayout(f"{len(costs)} layers cannot fill {num_stages} pipeline stages")
    before = (0, *accumulate(costs))
    bound = _least_bound(before, num_stages)
    stages, first = [], 0
    for left in range(num_stages, 0, -1):
        stop = len(costs) if left == 1 else _stop(before, first, left, bound)
        stages.append(range(first, stop))
        first = stop
    return tuple(stages)


@lru_cache(maxsize=256)
def pipeline_ranks(costs: tuple[int, ...], pp: int, vp: int) -> tuple[int, ...]:
    """The pipeline rank that holds each layer: stage s of `pp x vp` lies on rank `s % pp`.

    Narayanan et al., Efficient Large-Scale Language Model Training, 2021, section 2.2.
    """
    stages = deal_layers(costs, pp * vp)
    return tuple(stage % pp for stage, layers in enumerate(stages) for _ in layers)


def _stop(before: tuple[int, ...], first: int, left: int, bound: int) -> int:
    """Where the next of so many stages ends: near its share, if the others then can keep to the
    bound."""
    last = len(before) - left
    share = (before[-1] - before[first]) / left
    stop = first + 1
    while stop < last and before[stop + 1] - before[first] <= bound:
        middle = (before[stop] + before[stop + 1]) / 2 - before[first]
        if middle > share and _num_needed(before, stop, bound) <= left - 1:
            break
        stop += 1
    return stop


def _least_bound(before: tuple[int, ...], num_stages: int) -> int:
    """The lowest cost of the costliest stage, by bisection."""
    costs = [after - cost for cost, after in pairwise(before)]
    low, high = max(costs), before[-1]
    while low < high:
        middle = (low + high) // 2
        if _num_needed(before, 0, middle) <= num_stages:
            high = middle
        else:
            low = middle + 1
    return low


def _num_needed(before: tuple[int, ...], first: int, bound: int) -> int:
    """How few stages hold the layers from `first` on, none over the bound."""
    num_stages, begin = 0, first
    for stop in range(first + 1, len(before)):
        if before[stop] - before[begin] > bound:
            num_stages, begin = num_stages + 1, stop - 1
    return num_stages + (begin < len(before) - 1)
