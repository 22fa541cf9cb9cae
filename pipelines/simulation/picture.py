"""The picture of a simulated run: the timeline of any run, with its progress instead of a loss."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes

from elastic.simulation.trace import Availability
from pipelines.errors import UserError
from pipelines.observe.history.history import History
from pipelines.observe.view.event_lanes import GRID, QUIET
from pipelines.observe.view.time_axis import TimeAxis
from pipelines.observe.view.timeline import LOSS, render

LOST = "#d55e00"


def draw_simulation(history: History, trace: Availability, name: str, path: str) -> None:
    """Draw the timeline of a simulated run. Raises `UserError` if the file cannot be written."""

    def draw_nodes(axes: Axes, history: History, time_axis: TimeAxis) -> None:
        """The available nodes, and the world size of the run."""
        counts = list(trace.counts())
        times = [time_axis.place(time_s) for time_s, _ in counts]
        numbers = [number for _, number in counts]
        axes.set_ylabel("nodes available", color=QUIET, fontsize=10, labelpad=10)
        axes.yaxis.grid(color=GRID, linewidth=0.8)
        axes.set_ylim(0, 1.15 * trace.peak)
        ends = [*times, time_axis.place(trace.end_s)]
        axes.step(ends, [*numbers, numbers[-1]], where="post", color=LOSS, lw=1.4)

    try:
        render(history, f"simulation of {name}", Path(path), draw_nodes)
    except (OSError, ValueError) as error:
        raise UserError(f"--plot {path}: cannot be written ({error}); give a .png file") from None
