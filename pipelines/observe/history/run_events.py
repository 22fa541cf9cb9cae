"""Records that a reader of the journal keeps: run events, world sizes, placements, sessions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pipelines.observe.history.formatting import counted, duration

PHASES = {
    "RunOpened": "starting",
    "Form": "forming",
    "Reshard": "resharding",
    "Resume": "training",
    "Pause": "pausing",
    "Abort": "recovering",
    "SaveCheckpoint": "saving",
    "Stopped": "stopped",
}
"""The phase of the run after a line of each name."""

KINDS_WITH_STEP = (
    "checkpoint",
    "evaluated",
    "skipped",
    "not finite",
    "nothing counted",
    "spike",
    "audit",
)
"""The kinds of events whose journal line has the step."""


@dataclass(frozen=True, slots=True)
class RunEvent:
    """One event for display; `time` is in seconds since the epoch.

    `kind` is ready, joined, lost, left, draining, worker draining, resumed, rolled back,
    skipped, spike, audit, straggler, quarantined, used again, checkpoint, failed checkpoint,
    evaluated, hang, market, standby, starting, waiting, layout, step time, refused layout,
    controller restarted, controller error, controller recovered, not finite, nothing counted,
    stopping or stopped.
    `short` is its subject in a word or two. `value` is the held-out loss of an evaluation, or the
    seconds of a recovery; `metrics` are the other metrics of the held-out data.
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
    """A period that begins at `time` with `world_size` members, which train or do not."""

    time: float
    world_size: int
    generation: int
    training: bool


@dataclass(frozen=True, slots=True)
class WorkerPlace:
    """The node and pid of a worker's process, and when it became warm (seconds since the epoch)."""

    node: str
    pid: int
    since: float


@dataclass(slots=True)
class Session:
    """A period with a driver, from `start` to `end`."""

    start: float
    end: float


def controller_text(name: str, line: dict[str, Any]) -> tuple[str, str]:
    """The kind and the text of an event of the controller itself."""
    match name:
        case "ControllerRestarted":
            away_s = line["time"] - line["stopped_at"]
            return "controller restarted", f"controller restarted after {duration(away_s)}"
        case "ControllerRaised":
            text = f"controller error at {line['place']}: {line['message']}"
            return "controller error", text
    return "controller recovered", f"the controller has recovered at {line['place']}"


def step_time_text(line: dict[str, Any]) -> str:
    """The text of a `StepTimeCompared` line."""
    predicted_s, measured_s = line["predicted_s"], line["measured_s"]
    longer = measured_s / predicted_s - 1
    than = f"{abs(longer):.0%} {'more' if longer > 0 else 'less'} than predicted"
    return f"{line['layout']} takes {measured_s:.3g} s a step, {than} ({predicted_s:.3g} s)"


def evaluation_text(line: dict[str, Any]) -> str:
    """The text of an `Evaluated` line: the held-out loss and the metrics."""
    not_finite = line.get("not_finite", ())

    def shown(name: str, value: float | None, digits: str) -> str:
        if value is not None:
            return format(value, digits)
        return "not finite" if name in not_finite else "nothing counted"

    texts = [f"{name} {shown(name, value, '.4g')}" for name, value in line.get("metrics", ())]
    texts.insert(0, f"held-out loss {shown('loss', line['loss'], '.4f')}")
    return f"{', '.join(texts)} at step {line['step']}"


def rollback_text(before: int, line: dict[str, Any]) -> str:
    """The text of a `RolledBack` line, for a run that was at step `before`."""
    cause, num_skipped_batches = line.get("cause", ""), len(line.get("skipped_batches", ()))
    text = f"rolled back from step {before} to {line['step']}" + (f": {cause}" if cause else "")
    if num_skipped_batches:
        text += f"; the data of {counted(num_skipped_batches, 'step')} are skipped"
    return text


def market_text(line: dict[str, Any], num_leaving: int) -> str:
    """The text of a `MarketChosen` line, for which so many workers leave."""
    machines = f"{line['market']} machine"
    if num_leaving:
        return f"{counted(num_leaving, 'worker')} will leave for {machines}s: {line['cause']}"
    if not line["num_workers"]:
        return f"keeps its {machines}s: {line['cause']}"
    return f"asked for {counted(line['num_workers'], machines)}: {line['cause']}"
