"""A worker's part of the state, and the check that it is of the expected generation and step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from actors.storage.errors import StepMismatch
from elastic.geometry.assignment import Assignment

NOTHING_HELD = -1


@dataclass
class WorkerHolding:
    """This worker's part of the state under one assignment; the tensors are the trained ones."""

    assignment: Assignment
    tensors: dict[str, Tensor]


def holding_of(
    holdings: Mapping[int, WorkerHolding], held_step: int, generation: int, step: int
) -> WorkerHolding:
    """The holding of this generation. `held_step` is the newest step that the worker committed.
    Raises `StepMismatch` if the worker has no such holding, or one of another step."""
    if generation not in holdings or held_step != step:
        raise StepMismatch(
            f"the controller expects the state of step {step} under generation {generation}, but "
            f"this worker is at step {held_step}"
        )
    return holdings[generation]
