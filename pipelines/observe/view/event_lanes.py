"""The event lanes of the timeline picture: one row per kind of event, labelled where they fit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.text import Annotation
from matplotlib.transforms import blended_transform_factory

from pipelines.observe.history.formatting import shortened
from pipelines.observe.history.history import History
from pipelines.observe.history.run_events import RunEvent
from pipelines.observe.view.time_axis import TimeAxis

INK, QUIET, GRID = "#22272e", "#6b7280", "#e5e7eb"
MARKER_PIXELS = 12.0


@dataclass(frozen=True, slots=True)
class Lane:
    """How one kind of event is drawn; colours after Okabe and Ito (2008)."""

    name: str
    kinds: tuple[str, ...]
    colour: str
    marker: str
    marker_size: float = 7.5
    is_line: bool = False
    """Also drawn through the other panels."""


LANES = (
    Lane("lost", ("lost",), "#d55e00", "X", is_line=True),
    Lane("drained", ("left", "draining", "straggler", "quarantined"), "#cc79a7", "v"),
    Lane("joined", ("joined",), "#009e73", "^"),
    Lane("layout", ("layout",), "#0072b2", "D", marker_size=6),
    Lane("rolled back", ("rolled back",), "#e69f00", "<", is_line=True),
    Lane("numerics", ("skipped", "not finite", "spike", "audit"), "#56b4e9", "P"),
    Lane("checkpoint", ("checkpoint",), "#8a94a3", "d", marker_size=6),
    Lane("waiting", ("waiting",), "#8a94a3", "o", marker_size=6),
    Lane("stopped", ("stopped",), INK, "s", marker_size=6),
)


def used_lanes(history: History) -> list[Lane]:
    kinds = {run_event.kind for run_event in history.membership.run_events}
    return [lane for lane in LANES if kinds & set(lane.kinds)]


def draw_lanes(axes: Axes, lanes: list[Lane], history: History, time_axis: TimeAxis) -> None:
    """Fill a panel with the lanes; its x limits must be set already."""
    axes.set_ylim(len(lanes) - 0.4, -0.6)
    axes.spines["bottom"].set_visible(False)
    axes.set_yticks([])
    for row, lane in enumerate(lanes):
        axes.axhline(row, color=GRID, linewidth=0.8, zorder=0)
        run_events = [h for h in history.membership.run_events if h.kind in lane.kinds]
        _name(axes, lane, row, len(run_events))
        _draw_lane(axes, lane, row, run_events, time_axis)


def _name(axes: Axes, lane: Lane, row: int, number: int) -> None:
    where = blended_transform_factory(axes.transAxes, axes.transData)
    style: dict[str, Any] = {"transform": where, "va": "center_baseline", "fontsize": 9}
    axes.text(-0.03, row, lane.name, ha="right", color=QUIET, **style)
    axes.text(-0.005, row, f"{number:,}", ha="right", color=INK, fontweight="bold", **style)


def _draw_lane(
    axes: Axes, lane: Lane, row: int, run_events: list[RunEvent], time_axis: TimeAxis
) -> None:
    """Draw one marker for events that would overlap, with the longest label that fits."""
    pixels_per_s = axes.get_window_extent().width / np.diff(axes.get_xlim())[0]
    groups = _grouped(run_events, time_axis, MARKER_PIXELS / pixels_per_s)
    places = [time_axis.place(group[0].time) for group in groups]
    style: dict[str, Any] = {
        "color": lane.colour,
        "markersize": lane.marker_size,
        "markeredgewidth": 0,
    }
    axes.plot(places, [row] * len(places), marker=lane.marker, linestyle="none", **style)
    left_end = axes.get_xlim()[0]
    for place, right_end, group in zip(places, [*places[1:], np.inf], groups, strict=True):
        right_end = min(right_end, axes.get_xlim()[1])
        margin = MARKER_PIXELS * 1.4
        free_pixels = (
            (right_end - place) * pixels_per_s - 2 * margin,
            (place - left_end) * pixels_per_s,
        )
        used_pixels = _label(axes, (place, row), _wordings(group), free_pixels)
        left_end = place + (used_pixels + margin) / pixels_per_s


def _grouped(
    run_events: list[RunEvent], time_axis: TimeAxis, distance: float
) -> list[list[RunEvent]]:
    groups: list[list[RunEvent]] = []
    for run_event in run_events:
        place = time_axis.place(run_event.time)
        if groups and place - time_axis.place(groups[-1][0].time) < distance:
            groups[-1].append(run_event)
        else:
            groups.append([run_event])
    return groups


def _label(
    axes: Axes, where: tuple[float, int], wordings: list[str], free_pixels: tuple[float, float]
) -> float:
    """Write the longest wording that fits into the free pixels right or left of a marker.

    Returns the number of pixels used right of the marker.
    """
    for wording in wordings:
        text = _annotate(axes, where, wording, "left")
        width = text.get_window_extent().width
        if width <= free_pixels[0]:
            return float(width)
        text.remove()
        if width + 2 * MARKER_PIXELS <= free_pixels[1]:
            _annotate(axes, where, wording, "right")
            return 0.0
    return 0.0


def _annotate(axes: Axes, where: tuple[float, int], wording: str, align: str) -> Annotation:
    return axes.annotate(
        wording,
        where,
        xytext=(6 if align == "left" else -6, 0),
        textcoords="offset points",
        ha=align,
        va="center_baseline",
        fontsize=8,
        color=INK,
        bbox={"boxstyle": "square,pad=0.15", "facecolor": "white", "linewidth": 0},
        zorder=1,
    )


def _wordings(group: list[RunEvent]) -> list[str]:
    """The possible labels of events that share a marker, the longest first."""
    first = group[0]
    if len(group) == 1:
        full = f"{first.short}: {first.cause}" if first.cause else first.short
        return [shortened(full, 64), shortened(full, 36), shortened(first.short, 20)]
    names = ", ".join(run_event.short for run_event in group)
    return [*([names] if len(names) <= 40 else []), f"{first.short} +{len(group) - 1}"]
