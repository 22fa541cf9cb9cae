"""What readers of a journal remember of a run: its events, members, places and sessions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pipelines.observe.history.formatting import duration


@dataclass(frozen=True, slots=True)
class RunEvent:
    """One thing that a person wants to know of; `time` is in seconds since the epoch.

    `kind` is ready, joined, lost, left, leaving, draining, resumed, rolled back, skipped, spike,
    audit, straggler, avoided, used again, checkpoint, failed checkpoint, evaluated, starting,
    waiting, layout, refused layout, controller restarted, controller error, controller recovered,
    not finite, nothing counted, stopping or stopped;
    `short` says what it is about in a word or two; `value` is the held-out loss, or how many
    seconds a recovery took; `metrics` are the held-out data's other numbers.
    """

    time: float
    kind: str
    step: int
    generation: int
    world_size: int
    text: str
    short: str = ""
    worker: str = ""
    node: str = ""
    cause: str = ""
    value: float | None = None
    metrics: tuple[tuple[str, float | None], ...] = ()


@dataclass(frozen=True, slots=True)
class Stretch:
    """From `time` on, `world_size` workers were members, and trained or did not."""

    time: float
    world_size: int
    generation: int
    training: bool


@dataclass(frozen=True, slots=True)
class WorkerPlace:
    """Where a worker's process is, and since when it has been warm (seconds since the epoch)."""

    node: str
    pid: int
    since: float


@dataclass(slots=True)
class Session:
    """The run was being driven from `start` to `end`."""

    start: float
    end: float


def controller_text(name: str, line: dict[str, Any]) -> tuple[str, str]:
    """Of an event in which the controller reports on itself: its kind, and a sentence."""
    match name:
        case "ControllerRestarted":
            away_s = line["time"] - line["stopped_at"]
            return "controller restarted", f"controller restarted after {duration(away_s)}"
        case "ControllerRaised":
            text = f"controller error at {line['place']}: {line['message']}"
            return "controller error", text
    return "controller recovered", f"the controller has recovered at {line['place']}"


def evaluation_text(line: dict[str, Any]) -> str:
    """Of an `Evaluated` line: the held-out loss and the metrics."""
    not_finite = line.get("not_finite", ())

    def shown(name: str, value: float | None, digits: str) -> str:
        if value is not None:
            return format(value, digits)
        return "not finite" if name in not_finite else "nothing counted"

    texts = [f"{name} {shown(name, value, '.4g')}" for name, value in line.get("metrics", ())]
    texts.insert(0, f"held-out loss {shown('loss', line['loss'], '.4f')}")
    return f"{', '.join(texts)} at step {line['step']}"
