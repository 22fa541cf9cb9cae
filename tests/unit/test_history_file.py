"""`history.json`: a reader that continues from it has the same result as one that reads all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from long_runs import LongRun, opening, step_of
from written_runs import WrittenRun

from actors.storage.storage import DiskStorage
from elastic.protocol.commands import Resume
from elastic.protocol.controller_state import ControllerState
from elastic.protocol.events import Checkpointed, Evaluated
from elastic.protocol.notes import RolledBack
from elastic.protocol.wire import command_line, encode, event_line
from pipelines.observe.history.goodput import MAX_READINGS, MAX_SPANS
from pipelines.observe.history.history import History
from pipelines.observe.history.history_file import NAME, load_history
from pipelines.observe.history.membership import MAX_KEPT
from pipelines.observe.history.run_folder import RunFolder
from pipelines.observe.view.status import StatusReader


@pytest.fixture
def run(tmp_path: Path) -> WrittenRun:
    run = WrittenRun(tmp_path / "run")
    run.start(3)
    for _ in range(200):
        run.commit()
    run.lose("w2")
    run.resume("w0", "w1")
    run.commit()
    return run


def follow(folder: RunFolder) -> History:
    loaded = load_history(folder)
    loaded.follow()
    return loaded.history


def save(folder: RunFolder) -> None:
    loaded = load_history(folder)
    loaded.follow()
    loaded.save()


def damage_the_past(run: WrittenRun) -> None:
    """Overwrite the first half of each log, so that reading any of it fails."""
    for log in (run.folder.journal, run.folder.metrics):
        path = Path(log.url)
        content = path.read_bytes()
        path.write_bytes(b"!" * (len(content) // 2) + content[len(content) // 2 :])


def test_saved_history_continues_like_one_read_from_all_lines(run: WrittenRun) -> None:
    save(run.folder)
    run.roll_back(150)
    run.resume("w1", "w0")
    for _ in range(30):
        run.commit()
    run.stop("failed", "no more")
    saved, whole = load_history(run.folder), History()
    saved.follow()
    whole.take(run.folder.journal.lines(), run.folder.metrics.lines())
    assert saved.history == whole


def test_only_lines_after_the_saved_history_are_read(run: WrittenRun) -> None:
    before = follow(run.folder)
    save(run.folder)
    damage_the_past(run)
    assert follow(run.folder) == before
    run.append_event(Checkpointed(201, 2, "checkpoints/step-00000201-g2"))
    run_status = StatusReader(run.folder, {}).read()
    checkpoint = run_status.checkpoint()
    assert checkpoint and checkpoint.step == 201
    assert run_status.as_json()["step"] == 201


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"version": 1}', b'{"version": 0}'])
def test_damaged_history_file_is_ignored(run: WrittenRun, content: bytes) -> None:
    whole = follow(run.folder)
    (Path(run.folder.url) / NAME).write_bytes(content)
    assert follow(run.folder) == whole


def test_history_file_of_other_logs_is_ignored(run: WrittenRun) -> None:
    """A repaired journal has other lines and may be longer."""
    save(run.folder)
    journal = Path(run.folder.journal.url)
    lines = journal.read_text().splitlines()
    shorter = [line for line in lines if '"w2"' not in line]
    journal.write_text("\n".join([*shorter, *shorter]) + "\n")
    whole = History()
    whole.take(run.folder.journal.lines(), run.folder.metrics.lines())
    assert follow(run.folder) == whole
    journal.write_text("\n".join(shorter[:3]) + "\n")
    assert len(follow(run.folder).membership.run_events) <= 3


def test_status_without_a_history_file_reads_only_the_end_of_the_metrics(tmp_path: Path) -> None:
    LongRun(tmp_path / "run", 8_000).write()
    folder = RunFolder(DiskStorage(tmp_path / "run"))
    metrics = tmp_path / "run" / "metrics.jsonl"
    content = metrics.read_bytes()
    assert len(content) > 3 << 19
    metrics.write_bytes(b"!" * (1 << 18) + content[1 << 18 :])
    loaded = load_history(folder, needs_all_metrics=False)
    loaded.follow()
    assert loaded.metrics.num_torn == 0
    assert loaded.history.progress.step == 8_000


def test_history_is_bounded() -> None:
    """The newest events, minutes and steps are kept; counts and sums stay complete."""
    history, state = History(), ControllerState(generation=1)
    history.take([event_line(0.0, opening(10**6), state)], ())
    history.take([command_line(0.0, Resume(1, 0, "dp=4", ("w0",), (), 0), state)], ())
    for step in range(1, 6_001):
        now = 60.0 * step
        commit_event, evaluation = step_of(step, 1, now), Evaluated(1, step, 1.0)
        history.take([event_line(now, event, state) for event in (commit_event, evaluation)], ())
    membership, account = history.membership, history.account
    assert len(membership.run_events) == MAX_KEPT
    assert membership.num_run_events == 6_001, "including the start of training"
    assert [len(account.readings), account.num_readings] == [MAX_READINGS, 6_000]
    assert account.readings_from(5_990) == account.readings[-10:]
    assert len(account._spans) <= MAX_SPANS
    assert account.split().compute_s == pytest.approx(60.0 * 5_999 + 0.99)
    history.take([command_line(now, RolledBack(1, 3_000, 6_000, "checkpoint"), state)], ())
    assert account.split().redone_s == pytest.approx(60.0 * 3_000, rel=0.01)
    assert len(json.dumps(encode(history))) < 3 << 20
