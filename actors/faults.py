"""Faults on purpose: a worker does itself harm at a stated moment, as a sentence asked for."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from typing import Literal, get_args

Moment = Literal[
    "compute",
    "vote",
    "reading",
    "apply",
    "settling",
    "forming",
    "relaying",
    "evaluation",
    "writing",
    "written",
]
MOMENTS: tuple[Moment, ...] = get_args(Moment)


@dataclass(frozen=True, slots=True)
class Fault:
    """`kill`, `stop` (SIGSTOP), `hang` or `raise`: done by `worker` to itself, once.

    At the given moment of `step`, or of any step if it is 0. In `reading` the vote is decided and
    this worker has not seen it; in `settling` it comes to it after an abort. In `writing` and
    `written` its part of that step's checkpoint is about to be, and has become, durable. Forming
    and re-laying out have no step of their own: there `step` is the first one that the generation
    would train.
    """

    action: Literal["kill", "stop", "hang", "raise"]
    worker: str
    step: int
    moment: Moment = "compute"


class Faults:
    """One worker's share of the run's faults."""

    def __init__(self, worker: str, faults: tuple[Fault, ...] = ()) -> None:
        self._due = [fault for fault in faults if fault.worker == worker]

    def at(self, moment: Moment, step: int) -> None:
        """Do what is due now. `hang` blocks without ever asking for interruptions."""
        for fault in [f for f in self._due if f.moment == moment and f.step in (0, step)]:
            self._due.remove(fault)
            match fault.action:
                case "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                case "stop":
                    os.kill(os.getpid(), signal.SIGSTOP)
                case "hang":
                    time.sleep(3600)
                case "raise":
                    raise RuntimeError(f"{fault.worker} was told to raise at step {step}")
