"""Pipeline stages: layers dealt to stages by cost, in order, and the pipeline rank of each."""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate, pairwise

from elastic.geometry.errors import InvalidLayout


@lru_cache(maxsize=256)
def deal_layers(costs: tuple[int, ...], num_stages: int) -> tuple[range, ...]:
    """The layers of each stage: contiguous, no stage empty, the costliest as cheap as possible.

    Where several deals have the same costliest stage, each stage takes about an equal share of
    the remaining cost. Raises `InvalidLayout` if there are fewer layers than stages.
    """
    if len(costs) < num_stages:
        raise InvalidLayout(
            f"{len(costs)} layers cannot fill {num_stages} pipeline stages: lower pp or vp"
        )
    before = (0, *accumulate(costs))
    bound = _least_bound(before, num_stages)
    stages, first = [], 0
    for num_left in range(num_stages, 0, -1):
        stop = len(costs) if num_left == 1 else _stop(before, first, num_left, bound)
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


def _stop(before: tuple[int, ...], first: int, num_left: int, bound: int) -> int:
    """The end of the first of the `num_left` remaining stages: near an equal share of the cost, if
    the other stages can then keep to the bound."""
    last = len(before) - num_left
    share = (before[-1] - before[first]) / num_left
    stop = first + 1
    while stop < last and before[stop + 1] - before[first] <= bound:
        middle = (before[stop] + before[stop + 1]) / 2 - before[first]
        if middle > share and _num_needed(before, stop, bound) <= num_left - 1:
            break
        stop += 1
    return stop


def _least_bound(before: tuple[int, ...], num_stages: int) -> int:
    """The lowest possible cost of the costliest stage, by bisection."""
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
    """The fewest stages that hold the layers from `first` on, each within the bound."""
    num_stages, begin = 0, first
    for stop in range(first + 1, len(before)):
        if before[stop] - before[begin] > bound:
            num_stages, begin = num_stages + 1, stop - 1
    return num_stages + (begin < len(before) - 1)
