"""The timeline picture can be drawn for any run, and its labels do not overlap."""

from __future__ import annotations

import math
import random
from itertools import pairwise
from pathlib import Path

import matplotlib.image
import pytest
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Annotation
from written_runs import WrittenRun

from elastic.protocol.events import Checkpointed
from pipelines.observe.history.history import read_history
from pipelines.observe.history.run_folder import RunFolder
from pipelines.observe.view.event_lanes import draw_lanes, used_lanes
from pipelines.observe.view.time_axis import TimeAxis
from pipelines.observe.view.timeline import draw


def write_long_run(path: Path) -> RunFolder:
    """32 workers over three weeks, with about one loss and join per day, and one interruption."""
    chance = random.Random(7)
    run = WrittenRun(path)
    run.start(32, steps=2000)
    workers = list(run.workers)
    for number in range(2000):
        run.commit(loss=1 + 4 * math.exp(-number / 300), step_s=900)
        if chance.random() < 0.02:
            run.lose(workers.pop(chance.randrange(len(workers))), "spot instance reclaimed")
            run.resume(*workers)
        if len(workers) < 32 and chance.random() < 0.02:
            workers.append(f"w{32 + number}")
            run.ready(workers[-1])
            run.resume(*workers)
        if number % 100 == 0:
            run.append_event(Checkpointed(run.step, run.generation, "x"))
        if number == 1000:
            run.roll_back(950)
            run.stop("interrupted", "SIGTERM")
            run.now += 30 * 86400
            run.start(32)
            workers = list(run.workers)
    run.stop()
    return run.folder


@pytest.fixture(scope="module")
def long_run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return write_long_run(tmp_path_factory.mktemp("storage") / "long")


def coloured_fraction(png: Path) -> float:
    """The fraction of pixels that are neither white nor grey."""
    pixels = matplotlib.image.imread(png)[..., :3]
    return float((pixels.max(axis=2) - pixels.min(axis=2) > 0.15).mean())


def test_long_run_is_drawn(long_run: RunFolder, tmp_path: Path) -> None:
    draw(long_run, tmp_path / "timeline.png")
    pixels = matplotlib.image.imread(tmp_path / "timeline.png")
    assert pixels.shape[1] == 1560
    assert coloured_fraction(tmp_path / "timeline.png") > 0.1


def test_labels_of_a_lane_do_not_overlap(long_run: RunFolder) -> None:
    history = read_history(long_run)
    axes = make_axes(TimeAxis(history))
    draw_lanes(axes, used_lanes(history), history, TimeAxis(history))
    labels = [child for child in axes.get_children() if isinstance(child, Annotation)]
    renderer = axes.figure.canvas.get_renderer()
    boxes = [label.get_window_extent(renderer) for label in labels]
    rows = [label.xy[1] for label in labels]
    for row in set(rows):
        spans = sorted(
            (b.x0, b.x1) for b, label_row in zip(boxes, rows, strict=True) if label_row == row
        )
        assert all(first[1] <= second[0] for first, second in pairwise(spans))
    assert len(labels) > 10
    assert all(box.x1 <= axes.get_window_extent().x1 + 1 for box in boxes)


def make_axes(time_axis: TimeAxis) -> Axes:
    figure = Figure(figsize=(12, 2), dpi=100)
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.set_xlim(0, time_axis.length_s)
    return axes


def test_interruption_of_a_month_takes_at_most_3_percent_of_the_axis(long_run: RunFolder) -> None:
    history = read_history(long_run)
    time_axis = TimeAxis(history)
    driven_s = history.membership.wall_s()
    [(left, right, stop_s)] = time_axis.stops
    assert stop_s == pytest.approx(30 * 86400, rel=0.01)
    assert 0 < right - left < 0.03 * driven_s
    assert time_axis.length_s < 1.03 * driven_s
    assert time_axis.spans_stop(
        history.membership.sessions[0].end, history.membership.sessions[1].start
    )


def test_ticks_are_few_and_in_sensible_units(long_run: RunFolder, tmp_path: Path) -> None:
    axes = make_axes(TimeAxis(read_history(long_run)))
    TimeAxis(read_history(long_run)).label(axes, "black")
    labels = [tick.get_text() for tick in axes.get_xticklabels()]
    assert 5 <= len(labels) <= 13
    assert labels[:3] == ["0", "2 d", "4 d"]


def test_runs_with_few_or_no_steps_are_drawn(tmp_path: Path) -> None:
    run = WrittenRun(tmp_path / "run")
    draw(run.folder, tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists()
    run.start(2)
    draw(run.folder, tmp_path / "no_step.png")
    run.commit(loss=None)
    run.commit(loss=3.0)
    draw(run.folder, tmp_path / "one_step.png")
    assert (tmp_path / "no_step.png").stat().st_size > 10_000
    assert coloured_fraction(tmp_path / "one_step.png") > 0.02
