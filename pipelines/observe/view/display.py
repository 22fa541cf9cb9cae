"""The live display of a run: a panel in a terminal or notebook, plain lines in a log."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import datetime
from importlib import import_module
from itertools import pairwise
from types import TracebackType
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from pipelines.observe.history.formatting import duration, quantity, shortened
from pipelines.observe.history.history import History
from pipelines.observe.view.facts import events_table, speed, step_parts, steps, world


class Cell:
    """The output of a notebook cell, in place of `rich.live.Live`; needs IPython."""

    def __init__(self) -> None:
        self._display: Any = import_module("IPython.display").display
        self._shown: Any = None

    def start(self) -> None:
        """Do nothing: the first update creates the output."""

    def stop(self) -> None:
        """Do nothing: the last output stays."""

    def update(self, renderable: RenderableType, *, refresh: bool) -> None:
        if self._shown is None:
            self._shown = self._display(renderable, display_id=True)
        else:
            self._shown.update(renderable)


REDRAW_S = 0.25

PLAIN_EVERY_S = 10.0

PLAIN_SILENCE_S = 60.0
"""The interval of plain lines while nothing changes."""

TROUBLE_EVERY_S = 30.0

NUM_SHOWN_EVENTS = 6

MAX_WIDTH = 110

BARS = "▁▂▃▄▅▆▇█"


class Display:
    """Displays a run from its lines; as a context manager it restores the terminal at the end.

    In a terminal or a notebook it draws a panel, at most four times a second. Elsewhere it prints
    a line per event and a progress line about every ten seconds. Events before `since` (seconds
    since the epoch) are not shown: they are old when a run is resumed. The caller may pass a
    `history` that it updates itself.
    """

    def __init__(
        self,
        console: Console,
        run_name: str,
        since: float = 0.0,
        history: History | None = None,
    ) -> None:
        self.history = history or History()
        self._console = console
        self._run_name = run_name
        self._since = since
        self._num_printed = 0
        self._drawn_at = self._printed_at = float("-inf")
        self._printed_state = (0, "", 0)
        self._live: Live | Cell | None = None
        self._trouble = ""
        self._troubled_at = float("-inf")
        if console.is_jupyter:
            self._live = Cell()
        elif console.is_terminal and not console.is_dumb_terminal:
            self._live = Live(console=console, auto_refresh=False)

    def __enter__(self) -> Display:
        if self._live:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._live:
            self._live.stop()

    def update(
        self,
        now: float,
        journal: Iterable[dict[str, Any]] = (),
        metrics: Iterable[dict[str, Any]] = (),
        system: Iterable[dict[str, Any]] = (),
        trouble: str = "",
    ) -> None:
        """Add new lines, and refresh the display if it is due.

        `trouble` is the reason why the run waits for its storage at present, or empty.
        """
        self.history.take(journal, metrics, system)
        was_well, self._trouble = not self._trouble, trouble
        if self._live is None:
            self._print_trouble(now, was_well)
            self._print_events()
            self._print_progress(now)
        elif abs(now - self._drawn_at) >= REDRAW_S or self.history.membership.outcome:
            self._drawn_at = now
            self._live.update(self.panel(now), refresh=True)

    def summary(self, now: float) -> str:
        """The outcome or the phase of the run, and its summary, in one line."""
        membership = self.history.membership
        return f"{membership.outcome or membership.phase} · {self.history.summary(now)}"

    def panel(self, now: float) -> Panel:
        """The live panel, about twelve lines high."""
        membership = self.history.membership
        phase = membership.outcome or membership.phase
        style = "green" if phase in ("training", "completed") else "yellow"
        body = Table.grid(padding=(0, 2))
        body.add_column(style="dim", no_wrap=True)
        body.add_column(ratio=1)
        for name, value in self._facts():
            body.add_row(name, value)
        return Panel(
            Group(self._bar(), body, Text(), self._recent_events(now)),
            title=Text(self._run_name, style="bold"),
            title_align="left",
            subtitle=Text(
                f"{shortened(phase, 60)} · {duration(membership.wall_s(now))}", style=style
            ),
            subtitle_align="right",
            width=min(self._console.width, MAX_WIDTH),
            padding=(1, 2),
        )

    def _bar(self) -> Table:
        step, total = self.history.progress.step, self.history.membership.total_steps
        line = Table.grid(padding=(0, 2), expand=True)
        line.add_column(ratio=1)
        line.add_column(no_wrap=True)
        bar = ProgressBar(total=total or 1, completed=step if total else 0)
        line.add_row(bar, f"step {steps(self.history)}")
        return line

    def _facts(self) -> Iterator[tuple[str, Text]]:
        progress = self.history.progress
        if progress.loss is not None:
            trend = "" if self._console.options.ascii_only else sparkline(self._losses(), 32)
            yield "loss", Text(f"{progress.loss:.4f}  ").append(trend, style="cyan")
        if progress.reported:
            yield "reported", Text(progress.reported_text)
        if rate := speed(self.history):
            yield "speed", Text(rate)
        if parts := step_parts(self.history.step_time.recent):
            yield "step time", Text(parts)
        yield "workers", Text(world(self.history.membership))
        if self._trouble:
            yield "storage", Text(self._storage(), style="red")

    def _storage(self) -> str:
        return f"waiting for storage: {shortened(self._trouble, 200)}"

    def _print_trouble(self, now: float, was_well: bool) -> None:
        """Print storage trouble when it begins and ends, and at intervals while it lasts."""
        if not self._trouble and not was_well:
            self._print(now, "storage works again")
        if self._trouble and (was_well or now - self._troubled_at >= TROUBLE_EVERY_S):
            self._troubled_at = now
            self._print(now, self._storage())

    def _losses(self) -> list[float]:
        return [point.mean for point in self.history.progress.curve.points if not point.void]

    def _recent_events(self, now: float) -> Table:
        recent = self.history.membership.run_events[-NUM_SHOWN_EVENTS:]
        return events_table((event for event in recent if event.time >= self._since), now)

    def _print_events(self) -> None:
        """Print new events, except those of starting workers, which progress lines count."""
        membership = self.history.membership
        num_new = min(membership.num_run_events - self._num_printed, len(membership.run_events))
        new_events = membership.run_events[len(membership.run_events) - num_new :]
        self._num_printed = membership.num_run_events
        for run_event in new_events:
            is_start = run_event.kind in ("ready", "starting") and not run_event.world_size
            if run_event.time >= self._since and not is_start:
                self._print(run_event.time, run_event.text)

    def _print_progress(self, now: float) -> None:
        progress, membership = self.history.progress, self.history.membership
        silent_s = abs(now - self._printed_at)  # the clock may be set back
        state = (progress.step, membership.phase, len(membership.standbys))
        has_moved = state != self._printed_state
        if silent_s < (PLAIN_EVERY_S if has_moved else PLAIN_SILENCE_S) or membership.outcome:
            return
        self._printed_at, self._printed_state = now, state
        total = f"/{membership.total_steps}" if membership.total_steps else ""
        parts = [f"step {progress.step}{total}"]
        parts += [f"loss {progress.loss:.4f}"] if progress.loss is not None else []
        parts += [progress.reported_text] if progress.reported else []
        if progress.tokens_per_s is not None:
            parts.append(f"{quantity(progress.tokens_per_s)} {progress.unit}/s")
        self._print(now, " · ".join([*parts, world(membership), membership.phase]))

    def _print(self, time: float, text: str) -> None:
        clock = datetime.fromtimestamp(time).strftime("%H:%M:%S")
        line = f"{clock}  {shortened(text, 300)}"
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


def sparkline(values: list[float], width: int) -> str:
    """The values as at most `width` bars, each the mean of an equal part of them."""
    if not values:
        return ""
    width = min(width, len(values))
    edges = [index * len(values) // width for index in range(width + 1)]
    means = [sum(values[left:right]) / (right - left) for left, right in pairwise(edges)]
    low, span = min(means), max(means) - min(means) or 1.0
    return "".join(BARS[round((mean - low) / span * (len(BARS) - 1))] for mean in means)
