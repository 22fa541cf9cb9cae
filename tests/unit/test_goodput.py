"""Goodput accounting: each second of a run has one category."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest
from written_runs import WrittenRun

from elastic.protocol.commands import Abort, Pause
from elastic.protocol.events import NodeDraining, Paused, Quiesced, RolledForward, WorkerReady
from elastic.protocol.notes import Waited
from elastic.protocol.votes import StepRecord
from pipelines.observe.history.goodput import TimeSplit
from pipelines.observe.history.history import read_history


def split_of(run: WrittenRun, now: float | None = None) -> TimeSplit:
    return read_history(run.folder).account.split(now)


def nonzero_parts(run: WrittenRun, now: float | None = None) -> dict[str, float]:
    """The nonzero parts of the time split, rounded."""
    parts = {name: round(value, 6) for name, value in asdict(split_of(run, now)).items()}
    return {name: value for name, value in parts.items() if value}


def write_ten_steps(path: Path) -> WrittenRun:
    """Half a second of start, then ten steps of one second."""
    run = WrittenRun(path / "run")
    run.start(4)
    for _ in range(10):
        run.commit(step_s=1.0)
    return run


def make_record(run: WrittenRun, step: int, step_s: float) -> StepRecord:
    return StepRecord(run.now, step, run.generation, 4, 2.0, 100, 0.001, 1.0, step_s, False)


def test_steps_and_the_time_between_them_are_compute(tmp_path: Path) -> None:
    run = write_ten_steps(tmp_path)
    run.now += 3.0  # an evaluation
    run.commit(step_s=1.0)
    assert nonzero_parts(run) == {"compute_s": 14.0, "waiting_s": 0.5}
    assert nonzero_parts(run, run.now + 2.0) == {"compute_s": 16.0, "waiting_s": 0.5}
    assert split_of(run).goodput == pytest.approx(14.0 / 14.5)


def test_pause_lasts_from_the_step_boundary_to_the_start_of_the_next_step(tmp_path: Path) -> None:
    run = write_ten_steps(tmp_path)
    run.append_command(Pause(1, run.workers, "growth"))
    run.commit(step_s=1.0)
    run.now += 0.25
    run.append_event(Paused("w0", 1, run.step))
    run.now += 0.5
    assert nonzero_parts(run, run.now) == {"compute_s": 11.0, "paused_s": 0.75, "waiting_s": 0.5}
    run.resume(*run.workers)
    run.now += 0.25
    run.commit(step_s=30.0)
    assert nonzero_parts(run) == {"compute_s": 41.0, "paused_s": 1.0, "waiting_s": 0.5}


def test_stale_pause_is_ignored(tmp_path: Path) -> None:
    run = write_ten_steps(tmp_path)
    run.resume(*run.workers)
    run.commit(step_s=1.0)
    run.append_event(Paused("w3", 1, 10))
    run.commit(step_s=1.0)
    assert nonzero_parts(run) == {"compute_s": 12.0, "waiting_s": 0.5}


def test_step_interrupted_by_an_abort_counts_as_paused(tmp_path: Path) -> None:
    run = write_ten_steps(tmp_path)
    run.now += 0.75
    run.append_command(Abort(1, run.workers, "w3 lost"))
    run.now += 0.25
    run.resume("w0", "w1", "w2")
    run.commit(step_s=1.0)
    assert nonzero_parts(run) == {"compute_s": 11.0, "paused_s": 1.0, "waiting_s": 0.5}


def test_steps_reported_late_count_as_compute(tmp_path: Path) -> None:
    """In the two seconds before the abort one step commits, and another one is rolled forward."""
    run = write_ten_steps(tmp_path)
    run.now += 2.0
    run.append_command(Abort(1, run.workers, "w3 lost"))
    run.now += 0.5
    quiesced = {"gradients_complete": True, "torn": False}
    for worker in ("w0", "w1"):
        run.append_event(Quiesced(worker, 1, 11, records=(make_record(run, 11, 1.0),), **quiesced))
        run.append_event(RolledForward(worker, 1, make_record(run, 12, 0.75)))
    run.step = 12
    run.resume("w0", "w1", "w2")
    run.commit(step_s=1.0)
    assert nonzero_parts(run) == {"compute_s": 12.75, "paused_s": 0.75, "waiting_s": 0.5}


def test_steps_that_were_rolled_back_count_as_redone(tmp_path: Path) -> None:
    run = write_ten_steps(tmp_path)
    run.append_command(Abort(1, run.workers, "w3 lost"))
    run.now += 0.5
    run.roll_back(6)
    assert nonzero_parts(run) == {
        "compute_s": 6.0,
        "redone_s": 4.0,
        "paused_s": 0.5,
        "waiting_s": 0.5,
    }
    run.resume("w0", "w1", "w2")
    for _ in range(4):
        run.commit(step_s=2.0)
    assert nonzero_parts(run) == {
        "compute_s": 14.0,
        "redone_s": 4.0,
        "paused_s": 0.5,
        "waiting_s": 0.5,
    }


def test_time_with_too_few_workers_counts_as_waiting(tmp_path: Path) -> None:
    run = write_ten_steps(tmp_path)
    run.append_command(Abort(1, run.workers, "w3 lost"))
    run.now += 1.0
    run.append_command(Waited("1 of at least 2 workers are ready"))
    run.now += 60.0
    run.append_event(NodeDraining("node-9", run.now))
    assert nonzero_parts(run, run.now + 5) == {
        "compute_s": 10.0,
        "paused_s": 1.0,
        "waiting_s": 65.5,
    }
    run.now += 10.0
    run.append_event(WorkerReady("w4", "node-1", 7))
    run.append_command(Waited("2 of 4 workers are ready"))
    run.now += 1.0
    run.resume("w2", "w4")
    run.commit(step_s=1.0)
    assert nonzero_parts(run) == {"compute_s": 11.0, "paused_s": 1.0, "waiting_s": 71.5}


def test_time_without_a_controller_counts_as_waiting_and_undriven(tmp_path: Path) -> None:
    run = write_ten_steps(tmp_path)
    run.stop("interrupted", "SIGTERM")
    assert nonzero_parts(run, run.now + 99) == {"compute_s": 10.0, "waiting_s": 0.5}
    run.now += 3600.0
    run.start(4)
    run.commit(step_s=1.0)
    assert nonzero_parts(run) == {"compute_s": 11.0, "waiting_s": 3601.0, "undriven_s": 3600.0}
    assert split_of(run).goodput == pytest.approx(11 / 12)


def test_killed_session_ends_with_its_last_line(tmp_path: Path) -> None:
    """The unfinished step is lost, and so are the steps after the checkpoint."""
    run = write_ten_steps(tmp_path)
    run.now += 0.5
    run.append_event(WorkerReady("w9", "node-1", 7))
    run.now += 100.0
    run.step = 8
    run.start(4)
    run.commit(step_s=1.0)
    parts = {"compute_s": 9.0, "redone_s": 2.0, "paused_s": 0.5, "waiting_s": 101.0}
    assert nonzero_parts(run) == {**parts, "undriven_s": 100.0}


def test_time_split_is_recorded_every_minute_and_at_the_end(tmp_path: Path) -> None:
    run = WrittenRun(tmp_path / "run")
    run.start(4)
    for _ in range(400):
        run.commit(step_s=1.0)
    run.stop()
    readings = read_history(run.folder).account.readings
    assert len(readings) == 7
    assert [reading.step for reading in readings] == [60, 120, 180, 240, 300, 360, 400]
    assert readings[-1].split == split_of(run)


def test_worker_time_is_counted_by_node(tmp_path: Path) -> None:
    run = WrittenRun(tmp_path / "run")
    run.start(2)
    run.now += 9.5
    run.ready("w2", "node-1")
    run.now += 10.0
    run.lose("w1")
    run.now += 10.0
    history = read_history(run.folder)
    assert history.account.workers.by_place(run.now) == {"node-0": 50.0, "node-1": 20.0}
    run.stop()
    run.now += 100.0
    run.start(1)
    assert read_history(run.folder).account.workers.by_place() == {"node-0": 50.5, "node-1": 20.0}
