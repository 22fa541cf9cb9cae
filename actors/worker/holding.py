"""What a worker holds of the state, and the check of its label: at the bytes (DESIGN section 5)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from actors.storage.errors import WrongHolding
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
    """The part under this generation. Raises `WrongHolding` unless it is there and of this step;
    `held_step` is the step that the worker stands at."""
    if generation not in holdings or held_step != step:
        raise WrongHolding(
            f"the controller counts on the state of step {step} under generation {generation}: "
            f"this worker stands at step {held_step}"
        )
    return holdings[generation]
