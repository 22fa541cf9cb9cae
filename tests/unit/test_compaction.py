"""Compaction joins old segments and shrinks those of the journal; readers see the same."""

from __future__ import annotations

import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from long_runs import Every, LongRun, opening, step_of
from memory_storage import MemoryStorage

from actors.controller.compaction import (
    NUM_JOINED,
    NUM_LEFT,
    Compactor,
    compact_oldest,
    shrink_journal,
)
from actors.controller.journal import replay
from actors.storage.errors import LeaseLost
from actors.storage.line_logs import LineLog
from actors.storage.segments import segment_name
from elastic.controller.core import Core
from elastic.protocol.controller_state import ControllerState
from elastic.protocol.events import Woke
from elastic.protocol.step_records import RecordsSent
from elastic.protocol.wire import encode, event_line
from pipelines.observe.history.history import History

SEGMENT_BYTES = 20_000


def check_lease() -> None:
    """The lease is still held."""


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "run"
    LongRun(folder, 9_000, every=Every(loss=2_000, evaluation=100, checkpoint=200)).write()
    return folder


def make_segmented_log(folder: Path, name: str) -> LineLog:
    storage: Any = MemoryStorage()
    with open(folder / name, "rb") as file:
        begin, number = 0, 0
        while lines := b"".join(file.readlines(SEGMENT_BYTES)):
            storage.write(segment_name(name, 1 + number // 20, begin), lines)
            begin, number = begin + len(lines), number + 1
    return LineLog(storage, name)


def compact(log: LineLog, is_journal: bool) -> int:
    num_compactions = 0
    while compact_oldest(log, check_lease, is_journal):
        num_compactions += 1
    return num_compactions


def test_compacted_metrics_are_the_same_bytes_at_the_same_offsets(run_folder: Path) -> None:
    log = make_segmented_log(run_folder, "metrics.jsonl")
    content = (run_folder / "metrics.jsonl").read_bytes()
    before = len(log.all_segments())
    offsets = [segment.begin for segment in log.segments()]
    assert compact(log, is_journal=False) == (before - NUM_LEFT) // NUM_JOINED >= 2
    assert len(log.all_segments()) == before - (NUM_JOINED - 1) * (
        (before - NUM_LEFT) // NUM_JOINED
    )
    for offset in (0, *offsets[:: len(offsets) // 7]):
        assert b"".join(log.blocks(offset)) == content[offset:], "offsets stay valid"


def test_compacted_journal_gives_the_same_history_and_replay(run_folder: Path) -> None:
    log = make_segmented_log(run_folder, "journal.jsonl")
    whole, before, num_bytes = History(), replay(log), sum(log.storage.files().values())
    whole.take(log.lines(), ())
    assert compact(log, is_journal=True) >= 1
    assert sum(log.storage.files().values()) < num_bytes
    after = replay(log)
    assert encode(after.core.state) == encode(before.core.state)
    assert (after.now, after.commands_to_repeat()) == (before.now, before.commands_to_repeat())
    compacted = History()
    compacted.take(log.lines(), ())
    assert compacted.membership.run_events == whole.membership.run_events
    assert compacted.membership.stretches == whole.membership.stretches
    compacted_split, whole_split = compacted.account.split(), whole.account.split()
    assert encode(compacted_split) == {**encode(whole_split), **{
        name: pytest.approx(value, abs=1e-6)
        for name, value in encode(whole_split).items()
        if name != "is"
    }}  # fmt: skip


def test_compacted_journal_drops_the_lines_that_only_a_replay_needs(run_folder: Path) -> None:
    whole = (run_folder / "journal.jsonl").read_bytes()
    before, after = count_names(whole), count_names(shrink_journal(whole))
    dropped = {"ComputeTimed", "Woke", "PartWritten", "PublishCheckpoint"}
    assert dropped <= before.keys()
    kept_names = before.keys() - dropped
    assert {name: before[name] for name in kept_names} == after


def count_names(lines: bytes) -> Counter[str]:
    rows = map(json.loads, lines.splitlines())
    names = [row.get("event") or row.get("command") for row in rows]
    return Counter(name for name in names if name)


def test_compaction_keeps_the_end_time_of_a_session() -> None:
    run = Core()
    lines = [event_line(0.0, opening(10), run.state), event_line(1.0, Woke(), run.state)]
    lines += [event_line(60.0, Woke(), run.state), event_line(3600.0, opening(10), run.state)]
    lines += [event_line(3700.0, Woke(), run.state)]
    texts = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
    shrunk = shrink_journal(texts)
    assert len(shrunk.splitlines()) == 4
    history = History()
    history.take(map(json.loads, shrunk.splitlines()), ())
    assert [s.end - s.start for s in history.membership.sessions] == [60.0, 100.0]


def test_compaction_keeps_the_steps_of_sent_records() -> None:
    records = tuple(step_of(step, 1, 5.0).record for step in (1, 2))
    line = event_line(5.0, RecordsSent("w0", 1, records), ControllerState(generation=1))
    [shrunk] = shrink_journal(json.dumps(line).encode() + b"\n").splitlines()
    assert [row["step"] for row in json.loads(shrunk)["records"]] == [1, 2]
    assert len(shrunk) < 0.5 * len(json.dumps(line))


def test_journal_without_a_newer_full_state_is_not_compacted() -> None:
    storage: Any = MemoryStorage()
    begin = 0
    for number in range(2 * (NUM_JOINED + NUM_LEFT)):
        row: dict[str, Any] = {"time": 0.0, "event": "Woke", "generation": 0, "format": 3}
        row |= {"ControllerState": {}} if number == 3 else {}
        line = json.dumps(row).encode() + b"\n"
        storage.write(segment_name("log", 1, begin), line)
        begin += len(line)
    log = LineLog(storage, "log")
    before = storage.files()
    assert not compact_oldest(log, check_lease, is_journal=True)
    assert storage.files() == before


def test_next_compaction_removes_the_rest_of_an_interrupted_one(run_folder: Path) -> None:
    log = make_segmented_log(run_folder, "metrics.jsonl")
    content = (run_folder / "metrics.jsonl").read_bytes()
    checks = iter([None, LeaseLost("taken")])

    def check_then_lose() -> None:
        if error := next(checks):
            raise error

    with pytest.raises(LeaseLost):
        compact_oldest(log, check_then_lose, is_journal=False)
    assert b"".join(log.blocks()) == content
    num_joined = sum(segment.is_joined for segment in log.all_segments())
    assert num_joined == 1 and len(log.all_segments()) > len(log.segments())
    compact(log, is_journal=False)
    compact_oldest(log, check_lease, is_journal=False)
    assert b"".join(log.blocks()) == content
    assert len(log.all_segments()) == len(log.segments())


class BrokenOnce(MemoryStorage):
    """The first listing raises, like a library that receives a broken answer."""

    def __init__(self, objects: dict[str, bytes]) -> None:
        super().__init__(objects=objects)
        self.has_raised = False

    def files(self, folder: str = "") -> dict[str, int]:
        if not self.has_raised:
            self.has_raised = True
            raise ValueError("broken answer")
        return super().files(folder)


def test_compaction_continues_after_an_exception_of_any_kind() -> None:
    line = b'{"number": 1}\n'
    names = [segment_name("log", 1, i * len(line)) for i in range(NUM_JOINED + NUM_LEFT)]
    storage: Any = BrokenOnce(dict.fromkeys(names, line))
    none: Any = MemoryStorage("memory://none")
    compactor = Compactor(LineLog(none, "journal"), (LineLog(storage, "log"),), check_lease, 0.01)
    deadline = time.monotonic() + 20.0
    while len(storage.objects) > NUM_LEFT + 1 and time.monotonic() < deadline:
        time.sleep(0.01)
    compactor.close()
    assert storage.has_raised and len(storage.objects) == NUM_LEFT + 1
    assert len(list(LineLog(storage, "log").lines())) == len(names)
