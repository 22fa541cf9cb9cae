"""Trials of deep models: where all blocks are alike, two models with few blocks suffice."""

from __future__ import annotations

from collections.abc import Callable

from pipelines.training.models.next_token import NextToken
from pipelines.training.workload.workload import Workload

FEW, MORE = 4, 5
Measured = dict[str, int]
"""Numbers that grow by the same amount with each block."""


def measure_depth(workload: Workload, measure: Callable[[Workload], Measured]) -> Measured:
    """What `measure` returns for the workload. A deep transformer itself is not measured, as this
    would take a second for every few blocks."""
    if not isinstance(workload, NextToken) or workload.num_alike <= 2 * MORE:
        return measure(workload)
    few, more = (measure(workload.with_blocks(number)) for number in (FEW, MORE))
    num_others = workload.num_alike - MORE
    return {name: value + num_others * (value - few[name]) for name, value in more.items()}
