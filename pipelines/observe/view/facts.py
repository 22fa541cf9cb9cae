"""Texts and tables that the live display and `elastic status` share."""

from __future__ import annotations

from collections.abc import Iterable

from rich.table import Table
from rich.text import Text

from pipelines.observe.history.formatting import duration, quantity
from pipelines.observe.history.history import History
from pipelines.observe.history.membership import Membership
from pipelines.observe.history.run_events import RunEvent
from pipelines.observe.history.step_time import StepTimes

COLOURS = {
    "lost": "red",
    "failed checkpoint": "red",
    "rolled back": "yellow",
    "audit": "red",
    "hang": "red",
    "skipped": "yellow",
    "not finite": "yellow",
    "nothing counted": "yellow",
    "controller error": "red",
    "snapshot": "yellow",
    "spike": "yellow",
    "left": "yellow",
    "worker draining": "yellow",
    "refused layout": "yellow",
    "controller restarted": "yellow",
    "draining": "yellow",
    "straggler": "yellow",
    "market": "yellow",
    "standby": "yellow",
    "quarantined": "yellow",
    "joined": "green",
    "resumed": "green",
}


def ago(time: float, now: float) -> str:
    return f"{duration(round(max(0.0, now - time)))} ago"


def steps(history: History) -> str:
    """`78 of 200 · 2 min 36 s left`."""
    step, total = history.progress.step, history.membership.total_steps
    done = f"{step:,}" + (f" of {total:,}" if total else "")
    remaining_s = _remaining_s(history)
    return done if remaining_s is None else f"{done} · {duration(remaining_s)} left"


def speed(history: History) -> str:
    """`9.66k tokens/s, 0.8 steps/s, 12.3TFLOP/s a worker, MFU 41.0%` over the newest rows; empty
    before there are two rows."""
    progress = history.progress
    if progress.tokens_per_s is None:
        return ""
    parts = [f"{quantity(progress.tokens_per_s)} {progress.unit}/s"]
    parts.append(f"{progress.steps_per_s:.3g} steps/s")
    device = history.step_time.device.speed(history.step_time.recent)
    if device["tflops"] is not None:
        parts.append(f"{quantity(1e12 * device['tflops'])}FLOP/s a worker")
    if device["mfu"] is not None:
        parts.append(f"MFU {device['mfu']:.1%}")
    return ", ".join(parts)


def step_parts(times: StepTimes) -> str:
    """`compute 91%, communication 6%, vote 2%, other 1%`: parts of at least half a percent."""
    shares = times.shares().items()
    return ", ".join(f"{name} {share:.0%}" for name, share in shares if share >= 0.005)


def world(membership: Membership) -> str:
    """`3 of 4 workers, dp=3, generation 2, 1 standby`."""
    limit = f" of {membership.max_workers}" if membership.max_workers else ""
    text = f"{len(membership.members)}{limit} workers"
    if membership.members:
        text += f", {membership.layout}, generation {membership.generation}"
    if membership.standbys:
        num_standbys = len(membership.standbys)
        text += f", {num_standbys} {'standby' if membership.members else 'ready'}"
    return text


def events_table(run_events: Iterable[RunEvent], now: float) -> Table:
    """The events with their ages, the newest last."""
    table = Table.grid(padding=(0, 2), expand=True)
    table.add_column(justify="right", style="dim", no_wrap=True)
    table.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
    for run_event in run_events:
        text = Text(run_event.text, style=COLOURS.get(run_event.kind, ""))
        table.add_row(ago(run_event.time, now), text)
    return table


def _remaining_s(history: History) -> float | None:
    membership, progress = history.membership, history.progress
    if not membership.total_steps or not progress.steps_per_s or membership.outcome:
        return None
    return max(0, membership.total_steps - progress.step) / progress.steps_per_s
