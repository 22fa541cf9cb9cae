"""The timeline picture of a run: loss, events and world size over time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from matplotlib.transforms import blended_transform_factory

from pipelines.observe.history.formatting import duration
from pipelines.observe.history.history import History, read_history
from pipelines.observe.history.progress import Point
from pipelines.observe.history.run_events import Stretch
from pipelines.observe.history.run_folder import RunFolder
from pipelines.observe.view.event_lanes import GRID, INK, LANES, QUIET, draw_lanes, used_lanes
from pipelines.observe.view.time_axis import TimeAxis

LOSS, WORLD, STOP = "#0072b2", "#56b4e9", "#f3f4f6"
LANE_INCHES = 0.25
DrawPanel = Callable[[Axes, History, TimeAxis], None]


def draw(folder: RunFolder, out_png: Path) -> None:
    """Draw the timeline of a run from its files."""
    render(read_history(folder), folder.name, out_png)


def render(
    history: History, run_name: str, out_png: Path, draw_top: DrawPanel | None = None
) -> None:
    """Draw the timeline of a run; do nothing if its journal is empty. The top panel shows the loss,
    or what `draw_top` draws."""
    if not history.membership.sessions:
        return
    time_axis = TimeAxis(history)
    lanes = used_lanes(history)
    lane_inches = LANE_INCHES * max(len(lanes), 1)
    figure = Figure(figsize=(12, 6.0 + lane_inches), dpi=130, facecolor="white")
    FigureCanvasAgg(figure)
    heights = (3.4, lane_inches, 1.35)
    top, events, world = figure.subplots(3, 1, sharex=True, height_ratios=heights)
    figure.subplots_adjust(left=0.1, right=0.975, top=0.87, bottom=0.085, hspace=0.09)
    for axes in (top, events, world):
        _plain(axes)
    world.set_xlim(-0.012 * time_axis.length_s, 1.012 * time_axis.length_s)
    _title(figure, history, run_name)
    (draw_top or _draw_loss)(top, history, time_axis)
    draw_lanes(events, lanes, history, time_axis)
    _draw_world(world, history.membership.stretches, time_axis)
    for axes in (top, world):
        _draw_troubles(axes, history, time_axis)
    _draw_stops((top, events, world), time_axis)
    time_axis.label(world, QUIET)
    figure.savefig(out_png, format="png")


def _plain(axes: Axes) -> None:
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(GRID)
    axes.tick_params(length=0, labelsize=9, labelcolor=QUIET)
    axes.set_axisbelow(True)


def _title(figure: Figure, history: History, run_name: str) -> None:
    outcome = history.membership.outcome or history.membership.phase
    figure.text(0.026, 0.945, run_name, fontsize=15, fontweight="bold", color=INK)
    figure.text(0.026, 0.907, f"{outcome} · {history.summary()}", fontsize=10, color=QUIET)


def _draw_loss(axes: Axes, history: History, time_axis: TimeAxis) -> None:
    """Draw committed steps in colour with a band from lowest to highest, undone ones in grey."""
    points = history.progress.curve.points
    axes.set_ylabel("loss", color=QUIET, fontsize=10, labelpad=10)
    axes.yaxis.grid(color=GRID, linewidth=0.8)
    redone: dict[str, Any] = {
        "color": QUIET,
        "lw": 1.2,
        "linestyle": (0, (2, 1.5)),
        "label": "redone",
    }
    for run in _runs(points, time_axis):
        places = [time_axis.place(point.time) for point in run]
        means = [point.mean for point in run]
        if run[0].void:
            axes.plot(places, means, **redone)
            redone["label"] = None
            continue
        lows, highs = [point.low for point in run], [point.high for point in run]
        axes.fill_between(places, lows, highs, color=LOSS, alpha=0.18, linewidth=0)
        axes.plot(places, means, color=LOSS, linewidth=1.7, solid_capstyle="round")
    _draw_evaluations(axes, history, time_axis)
    means = [point.mean for point in points]
    if not means:
        axes.set_yticks([])
        axes.text(0.5, 0.5, "no step yet", transform=axes.transAxes, ha="center", color=QUIET)
    elif min(means) > 0 and max(means) > 30 * min(means):
        axes.set_yscale("log")
    if axes.get_legend_handles_labels()[1]:
        axes.legend(loc="upper right", frameon=False, fontsize=9, labelcolor=QUIET)


def _runs(points: list[Point], time_axis: TimeAxis) -> list[list[Point]]:
    """Cut the curve where steps were undone by a rollback and where the run was stopped.

    A section of undone points begins at the last valid point.
    """
    runs: list[list[Point]] = []
    last: Point | None = None
    for point in points:
        if last is None or time_axis.spans_stop(last.time, point.time):
            runs.append([])
        elif last.void != point.void:
            runs.append([replace(last, void=True)] if point.void else [])
        runs[-1].append(point)
        last = point
    return runs


def _draw_evaluations(axes: Axes, history: History, time_axis: TimeAxis) -> None:
    run_events = history.membership.run_events
    evaluations = [
        (time_axis.place(run_event.time), run_event.value)
        for run_event in run_events
        if run_event.kind == "evaluated" and run_event.value is not None
    ]
    if evaluations:
        axes.plot(
            [place for place, _ in evaluations],
            [value for _, value in evaluations],
            linestyle="none",
            marker="o",
            markersize=5.5,
            markerfacecolor="white",
            markeredgecolor=INK,
            markeredgewidth=1.2,
            zorder=4,
            label="held-out loss",
        )


def _draw_world(axes: Axes, stretches: list[Stretch], time_axis: TimeAxis) -> None:
    """Draw the world size as an area, paler while nothing trains, with generation numbers."""
    axes.set_ylabel("world size", color=QUIET, fontsize=10, labelpad=10)
    axes.yaxis.set_major_locator(MaxNLocator(4, integer=True))
    axes.yaxis.grid(color=GRID, linewidth=0.8)
    axes.set_ylim(0, 1.3 * max([1, *(stretch.world_size for stretch in stretches)]))
    lefts = np.array([time_axis.place(stretch.time) for stretch in stretches])
    rights = np.append(lefts[1:], time_axis.length_s)[: len(lefts)]
    sizes = np.array([stretch.world_size for stretch in stretches], dtype=int)
    trains = np.array([stretch.training for stretch in stretches], dtype=bool)
    for shown, alpha in ((trains, 0.5), (~trains, 0.2)):
        widths = (rights - lefts)[shown]
        axes.bar(lefts[shown], sizes[shown], widths, align="edge", color=WORLD, alpha=alpha, lw=0)
    axes.step(
        [0.0, *lefts, time_axis.length_s],
        [0, *sizes, *sizes[-1:]],
        where="post",
        color=LOSS,
        lw=1.4,
    )
    _number_generations(axes, stretches, time_axis)


def _number_generations(axes: Axes, stretches: list[Stretch], time_axis: TimeAxis) -> None:
    """Write the generation numbers above the area, as many as fit."""
    pixels_per_s = axes.get_window_extent().width / np.diff(axes.get_xlim())[0]
    top = max([1, *(stretch.world_size for stretch in stretches)])
    free_from = -np.inf
    for stretch in stretches:
        place, text = time_axis.place(stretch.time), f"g{stretch.generation}"
        if stretch.training and place >= free_from:
            axes.annotate(
                text,
                (place, top),
                xytext=(1, 4),
                textcoords="offset points",
                fontsize=8,
                color=QUIET,
            )
            free_from = place + (9 * len(text) + 20) / pixels_per_s


def _draw_troubles(axes: Axes, history: History, time_axis: TimeAxis) -> None:
    """Draw lost workers and rollbacks as thin lines."""
    colours = {kind: lane.colour for lane in LANES if lane.is_line for kind in lane.kinds}
    troubles = [h for h in history.membership.run_events if h.kind in colours]
    alpha = 0.45 if len(troubles) <= 12 else 0.22
    for trouble in troubles:
        place = time_axis.place(trouble.time)
        axes.axvline(place, color=colours[trouble.kind], lw=0.9, alpha=alpha, zorder=1)


def _draw_stops(panels: tuple[Axes, Axes, Axes], time_axis: TimeAxis) -> None:
    """Draw grey bands for the times without a driver."""
    for left, right, stop_s in time_axis.stops:
        for axes in panels:
            axes.axvspan(left, right, facecolor=STOP, edgecolor="none", zorder=-1)
        panels[0].text(
            (left + right) / 2,
            0.5,
            f"stopped for {duration(stop_s)}",
            transform=blended_transform_factory(panels[0].transData, panels[0].transAxes),
            rotation=90,
            ha="center",
            va="center",
            fontsize=8,
            color=QUIET,
        )
