"""Reading and following the files of a run, and the history computed from them."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st
from written_runs import WrittenRun, append

from actors.storage.line_logs import LineLog
from actors.storage.storage import DiskStorage
from elastic.protocol.commands import StopWorker
from elastic.protocol.events import (
    Checkpointed,
    ComputeTimed,
    Evaluated,
    NodeDraining,
    WorkerDraining,
)
from elastic.protocol.notes import NodeQuarantined, NodeReleased, Replaced
from pipelines.observe.history.formatting import duration, quantity, shortened
from pipelines.observe.history.history import History, read_history
from pipelines.observe.history.progress import Curve
from pipelines.observe.history.run_folder import Tail

ROWS = st.lists(st.dictionaries(st.text(max_size=5), st.text(max_size=20), max_size=3), max_size=12)


@given(rows=ROWS, cuts=st.lists(st.integers(0, 600), max_size=8), max_bytes=st.integers(1, 64))
def test_tail_returns_every_line_once_wherever_writes_are_cut(
    rows: list[dict[str, str]], cuts: list[int], max_bytes: int
) -> None:
    data = b"".join(json.dumps(row).encode() + b"\n" for row in rows)
    edges = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    with TemporaryDirectory() as name:
        path, offset, read_rows = Path(name) / "lines.jsonl", 0, []
        for start, end in pairwise(edges):
            with path.open("ab") as file:
                file.write(data[start:end])
            tail = Tail(LineLog(DiskStorage(path.parent), path.name), offset)
            read_rows += [row for block in tail.blocks(max_bytes) for row in block]
            offset = tail.offset
    assert read_rows == rows
    assert offset == len(data)


def test_tail_waits_for_the_file_and_for_the_end_of_a_line(tmp_path: Path) -> None:
    path = tmp_path / "later.jsonl"
    tail = Tail(LineLog(DiskStorage(tmp_path), path.name))
    assert tail.read() == []
    path.write_text('{"step": 1}\n{"step": 2')
    assert tail.read() == [{"step": 1}]
    assert tail.read() == []
    with path.open("a") as file:
        file.write("}\n")
    assert tail.read() == [{"step": 2}]


def test_tail_skips_and_counts_torn_lines(tmp_path: Path) -> None:
    path = tmp_path / "torn.jsonl"
    path.write_text('{"step": 1}\n{"ste{"step": 2}\n[3]\n{"step": 4}\n')
    tail = Tail(LineLog(DiskStorage(tmp_path), path.name))
    assert list(tail.drain()) == [{"step": 1}, {"step": 4}]
    assert tail.num_torn == 2


def test_losses_joins_and_redone_steps_are_counted(tmp_path: Path) -> None:
    run = WrittenRun(tmp_path / "run")
    run.start(4, steps=20)
    for _ in range(10):
        run.commit()
    run.lose("w3", "connection reset")
    run.now += 0.2
    run.roll_back(6)
    run.resume("w0", "w1", "w2")
    for _ in range(8):
        run.commit()
    run.ready("w4", "node-1")
    run.resume("w0", "w1", "w2", "w4")
    run.commit(loss=None)
    run.stop()
    history = read_history(run.folder)
    membership, progress = history.membership, history.progress
    assert (membership.num_lost, membership.num_joined, progress.num_redone) == (1, 1, 4)
    assert (progress.step, progress.num_skipped, progress.loss) == (15, 1, 2.0)
    assert membership.outcome == "completed"
    assert membership.total_steps == 20
    assert history.account.split().compute_s == pytest.approx(15 * 0.1)
    assert history.goodput() == pytest.approx(1.5 / (0.5 + 1.9 + 0.2))
    loss_event = next(h for h in membership.run_events if h.kind == "lost")
    assert (loss_event.worker, loss_event.node, loss_event.cause, loss_event.step) == (
        "w3",
        "node-0",
        "connection reset",
        10,
    )
    resumed = [h for h in membership.run_events if h.kind == "resumed"]
    assert resumed[1].value == pytest.approx(0.2)
    assert resumed[2].value is None


def test_planned_drain_is_no_loss_and_a_kill_counts_once(tmp_path: Path) -> None:
    run = WrittenRun(tmp_path / "run")
    run.start(4)
    run.ready("w4", "node-9")
    run.append_event(NodeDraining("node-9", run.now + 120))
    run.append_event(WorkerDraining("w3", "requested"))
    run.resume("w0", "w1", "w2")
    for worker in ("w3", "w4"):
        run.append_command(StopWorker(worker, "it was drained"))
        run.lose(worker, "exited")
    run.append_command(StopWorker("w2", "it did not unwind in time"))
    run.lose("w2", "killed by signal 9")
    membership = read_history(run.folder).membership
    departures = [(h.worker, h.cause) for h in membership.run_events if h.kind == "left"]
    assert departures == [("w3", "requested"), ("w4", "node node-9 is draining")]
    assert membership.num_lost == 1
    assert membership.run_events[-1].cause == "it did not unwind in time"
    assert membership.members == ("w0", "w1")


def test_stragglers_and_standby_workers_on_a_quarantined_node_are_no_losses(tmp_path: Path) -> None:
    run = WrittenRun(tmp_path / "run")
    run.start(2)
    run.ready("w2", "node-1")
    run.ready("w3", "node-1")
    run.append_event(ComputeTimed(1, 20, (0.1, 0.3)))
    run.append_event(ComputeTimed(1, 40, (), ((1, 3.0),)))
    run.append_command(Replaced("w1", "it is slow"))
    run.resume("w0", "w2")
    run.append_command(StopWorker("w1", "it was drained"))
    run.append_command(NodeQuarantined("node-1", run.now + 60, "3 crashes"))
    run.append_command(StopWorker("w3", "its node is quarantined"))
    membership = read_history(run.folder).membership
    assert membership.compute_s == {"w0": 0.1, "w1": 0.3}
    assert membership.quarantined == {"node-1": run.now + 60}
    messages = [
        h.text for h in membership.run_events if h.kind in ("straggler", "quarantined", "left")
    ]
    assert messages == [
        "w1 will be replaced: it is slow",
        "w1 left: it is slow",
        "node node-1 is quarantined: 3 crashes",
        "w3 left: its node is quarantined",
    ]
    assert (membership.num_lost, membership.members) == (0, ("w0", "w2"))
    run.lose("w2")
    run.append_command(NodeReleased("node-1", "its quarantine is over"))
    membership = read_history(run.folder).membership
    assert (membership.num_lost, membership.quarantined) == (1, {}), (
        "a member on that node that dies is lost"
    )


def test_time_between_two_sessions_does_not_count(tmp_path: Path) -> None:
    run = WrittenRun(tmp_path / "run")
    run.start(2)
    run.commit(step_s=10.0)
    run.stop("interrupted", "SIGTERM")
    run.lose("w0", "stopped")
    run.now += 86400
    run.start(2)
    run.commit(step_s=10.0)
    membership = read_history(run.folder).membership
    assert membership.wall_s() == pytest.approx(21.0)
    assert membership.wall_s(now=run.now + 5) == pytest.approx(26.0)
    assert (membership.num_lost, membership.num_joined) == (0, 0)
    assert membership.outcome is None


def test_unknown_journal_lines_change_nothing(tmp_path: Path) -> None:
    run = WrittenRun(tmp_path / "run")
    run.start(2)
    before = read_history(run.folder).membership
    append(run.folder.journal, {"time": run.now, "event": "Telepathy", "worker": "w1"})
    append(run.folder.journal, {"time": run.now, "state": "ControllerState", "body": {}})
    assert read_history(run.folder).membership == before


def test_checkpoints_and_evaluations_have_their_own_step(tmp_path: Path) -> None:
    run = WrittenRun(tmp_path / "run")
    run.start(2)
    for _ in range(5):
        run.commit()
    run.append_event(Checkpointed(3, 1, "checkpoints/3"))
    run.append_event(Evaluated(1, 4, 1.25))
    *_, checkpoint, evaluation = read_history(run.folder).membership.run_events
    assert (checkpoint.kind, checkpoint.step) == ("checkpoint", 3)
    assert (evaluation.step, evaluation.value) == (4, 1.25)


@given(st.lists(st.floats(0.1, 10.0), min_size=1, max_size=300), st.integers(2, 32))
def test_curve_stays_small_and_keeps_its_mean_and_extremes(losses: list[float], limit: int) -> None:
    curve = Curve(limit)
    for step, loss in enumerate(losses, start=1):
        curve.add(float(step), step, loss)
    assert len(curve.points) <= limit
    assert curve.points[-1].step == len(losses)
    assert min(point.low for point in curve.points) == min(losses)
    assert max(point.high for point in curve.points) == max(losses)
    total = sum(point.mean * point.num_steps for point in curve.points)
    assert total == pytest.approx(sum(losses))


def test_curve_marks_steps_that_were_rolled_back() -> None:
    curve = Curve()
    for step in (1, 2, 3, 4, 5):
        curve.add(float(step), step, 2.0)
    curve.roll_back(4)
    curve.add(6.0, 4, 2.0)
    assert [(p.step, p.void) for p in curve.points[2:]] == [
        (3, False),
        (4, True),
        (5, True),
        (4, False),
    ]


def test_throughput_is_computed_over_the_wall_clock() -> None:
    history = History()
    rows = [
        {"time": 100.0 + 2 * n, "step": n, "tokens": 500, "step_s": 1.0, "lr": 0.1, "loss": 1.0}
        for n in range(1, 40)
    ]
    history.take([], rows)
    assert history.progress.tokens_per_s == pytest.approx(250)
    assert history.progress.steps_per_s == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0 s"), (0.214, "0.21 s"), (59.7, "1 min"), (723, "12 min 3 s"), (86399, "1 d")],
)
def test_durations_are_formatted_for_people(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_quantities_and_texts_are_shortened() -> None:
    assert [quantity(value) for value in (950, 2800, 350_000, 1.2e9)] == [
        "950",
        "2.80k",
        "350k",
        "1.20G",
    ]
    assert shortened("one\ntwo  three", 9) == "one two…"
