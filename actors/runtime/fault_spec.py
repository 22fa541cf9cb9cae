"""The specification of an injected fault: what a worker does to itself, and when."""

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
    "resharding",
    "evaluation",
    "snapshot",
    "writing",
    "written",
]
Action = Literal["kill", "stop", "hang", "raise", "flip", "nan", "slow", "slow_link", "ecc"]
MOMENTS: tuple[Moment, ...] = get_args(Moment)


@dataclass(frozen=True, slots=True)
class Fault:
    """`kill`, `stop` (SIGSTOP), `hang`, `raise`, `flip` (a bit of a parameter) or `nan` (its loss):
    `worker` does it to itself, once. `slow`: from that step on it computes `factor` times as much.
    `slow_link`: its links are `factor` times slower, as it measures them itself. `ecc`: its device
    reports an error, before it joins if `step` is 0.

    It happens at `moment` of `step`, or of any step if `step` is 0:

    - `reading`: the vote is decided, and this worker has not seen it.
    - `rolling_forward`: this worker applies a decided vote after an abort.
    - `snapshot`: its own copy of the step exists, and the copies elsewhere do not.
    - `writing`, `written`: its part of the step's checkpoint is about to be, or is, durable.
    - `forming`, `resharding`: these belong to no step; `step` is the first step that the
      generation would train.
    """

    action: Action
    worker: str
    step: int
    moment: Moment = "compute"
    factor: float = 1.0
