"""What the live panel and `elastic status` both say of a run, in the same words."""

from __future__ import annotations

from collections.abc import Iterable

from rich.table import Table
from rich.text import Text

from pipelines.observe.history.formatting import counted, duration, quantity
from pipelines.observe.history.history import History
from pipelines.observe.history.membership import Membership
from pipelines.observe.history.progress import RunProgress
from pipelines.observe.history.run_events import RunEvent

COLOURS = {
    "lost": "red",
    "failed checkpoint": "red",
    "rolled back": "yellow",
    "audit": "red",
    "skipped": "yellow",
    "not finite": "yellow",
    "nothing counted": "yellow",
    "controller error": "red",
    "spike": "yellow",
    "left": "yellow",
    "leaving": "yellow",
    "refused layout": "yellow",
    "controller restarted": "yellow",
    "draining": "yellow",
    "straggler": "yellow",
    "quarantined": "yellow",
    "joined": "green",
    "resumed": "green",
}


def ago(time: float, now: float) -> str:
    return f"{duration(round(max(0.0, now - time)))} ago"


def steps(history: History) -> str:
    """`78 of 200 · 2 min 36 s left`."""
    step, total = history.progress.step, history.membership.total_steps
    told = f"{step:,}" + (f" of {total:,}" if total else "")
    remaining_s = _remaining_s(history)
    return told if remaining_s is None else f"{told} · {duration(remaining_s)} left"


def speed(progress: RunProgress) -> str:
    """Over the newest rows, or empty before there are two."""
    if progress.tokens_per_s is None:
        return ""
    return f"{quantity(progress.tokens_per_s)} tokens/s, {progress.steps_per_s:.3g} steps/s"


def world(membership: Membership) -> str:
    """`3 of 4 workers, dp=3, generation 2, 1 spare`."""
    most = f" of {membership.max_workers}" if membership.max_workers else ""
    told = f"{len(membership.members)}{most} workers"
    if membership.members:
        told += f", {membership.layout}, generation {membership.generation}"
    if membership.standbys:
        standbys = counted(len(membership.standbys), "spare")
        told += f", {standbys}" if membership.members else f", {len(membership.standbys)} ready"
    return told


def news(run_events: Iterable[RunEvent], now: float) -> Table:
    """Happenings with their ages, the newest last."""
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
