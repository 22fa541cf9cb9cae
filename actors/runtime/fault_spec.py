"""A fault on purpose, as a sentence asks for it: which harm a worker does itself, and when."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Moment = Literal[
    "compute",
    "vote",
    "reading",
    "apply",
    "rolling_forward",
    "forming",
    "relaying",
    "evaluation",
    "snapshot",
    "writing",
    "written",
]
MOMENTS: tuple[Moment, ...] = get_args(Moment)


@dataclass(frozen=True, slots=True)
class Fault:
    """`kill`, `stop` (SIGSTOP), `hang`, `raise`, `flip` (a bit of a parameter) or `nan` (its loss):
    done by `worker` to itself, once. `slow`: from that step on it computes `factor` times as much.

    At the given moment of `step`, or of any step if it is 0. In `reading` the vote is decided and
    this worker has not seen it; in `settling` it comes to it after an abort. In `snapshot` its own
    copy of that step is there, and others are not. In `writing` and `written` its part of that
    step's checkpoint is about to be, and has become, durable. Forming and re-laying out have no
    step of their own: there `step` is the first one that the generation would train.
    """

    action: Literal["kill", "stop", "hang", "raise", "flip", "nan", "slow"]
    worker: str
    step: int
    moment: Moment = "compute"
    factor: float = 1.0
