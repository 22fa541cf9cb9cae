"""The journal of long runs: its size per step, the start of a replay, and bounded state."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from long_runs import (
    NUM_MANY_WORKERS,
    POLICY,
    Every,
    LongRun,
    answers_to,
    long_run_policy,
    opening,
    step_of,
)

from actors.controller.journal import open_journal
from actors.storage.file_names import JOURNAL
from actors.storage.lease import claim
from actors.storage.line_logs import LineLog
from actors.storage.storage import DiskStorage
from elastic.controller.core import Core
from elastic.duties.rollback import void_after
from elastic.protocol.commands import (
    DropCheckpoints,
    Form,
    RequestCheckpoint,
    Reshard,
    Resume,
    SetAside,
    Stopped,
    StopWorker,
)
from elastic.protocol.controller_events import CheckpointsRemoved
from elastic.protocol.controller_state import ControllerState
from elastic.protocol.duty_records import VoidedCheckpoints
from elastic.protocol.duty_state import CheckpointDuty
from elastic.protocol.events import Event, Quiesced, RunOpened, Woke, WorkerLost
from elastic.protocol.pending_commands import PendingCommands
from elastic.protocol.phases import Aborting, Running
from elastic.protocol.step_records import NUM_SENT_RECORDS, RecordsSent
from elastic.protocol.wire import UnreadableJournal, encode
from elastic.replay.journal_lines import MAX_HELD, MAX_REPLAYED, JournalWriter
from elastic.replay.replay import Replay
from elastic.reshard.snapshot_placement import Placement


def lines_of(folder: Path) -> list[str]:
    return (folder / "journal.jsonl").read_text().splitlines()


def replay_lines(texts: list[str]) -> Replay:
    replay = Replay()
    for text in texts:
        replay.take(json.loads(text))
    return replay


def newest_full_state(texts: list[str]) -> int:
    return max(index for index, text in enumerate(texts) if '"ControllerState"' in text)


@pytest.mark.parametrize(("step_s", "max_bytes"), [(20.0, 350), (1.0, 125), (0.001, 15)])
def test_journal_stays_within_its_bytes_per_step(
    tmp_path: Path, step_s: float, max_bytes: float
) -> None:
    """The default policy applies: with reports of compute times, and checkpoints by time."""
    num_steps = 3 * MAX_REPLAYED
    LongRun(tmp_path / "run", num_steps, step_s).write()
    assert sum(map(len, lines_of(tmp_path / "run"))) / num_steps <= max_bytes


@pytest.mark.parametrize("step_s", [20.0, 1.0, 0.001])
def test_replay_from_the_newest_full_state_is_short_and_complete(
    tmp_path: Path, step_s: float
) -> None:
    """The run exceeds every buffer: held steps, kept records, two lost workers."""
    run = LongRun(tmp_path / "run", 5_000, step_s, every=Every(loss=2_000))
    run.write()
    texts = lines_of(tmp_path / "run")
    newest = replay_lines(texts[newest_full_state(texts) :])
    whole = replay_lines(texts)
    assert encode(newest.core.state) == encode(whole.core.state)
    assert newest.commands_to_repeat() == whole.commands_to_repeat()
    assert newest.num_events <= MAX_REPLAYED
    num_lost_steps = run.core.state.committed_step - newest.core.state.committed_step
    assert num_lost_steps <= min(MAX_HELD, 1 + 31 / step_s), "only reports that the workers repeat"


def test_journal_of_1000_workers_stays_within_its_bytes_per_step(
    tmp_path: Path,
) -> None:
    """One worker is a straggler all the time, and microbatches are dealt evenly."""
    num_steps, policy = 3_000, long_run_policy(NUM_MANY_WORKERS)
    policy = replace(policy, straggler_reduce=False)
    LongRun(tmp_path / "run", num_steps, policy=policy, slow_rank=1).write()
    texts = lines_of(tmp_path / "run")
    resumed = next(i for i, text in enumerate(texts) if '"command": "Resume"' in text)
    texts = texts[resumed + 2 :]
    checkpoint_kinds = ('"PartWritten"', '"PublishCheckpoint"')
    num_bytes, num_checkpoint_bytes = 0, 0
    for text in texts:
        if any(kind in text[:80] for kind in checkpoint_kinds):
            num_checkpoint_bytes += len(text)
        else:
            num_bytes += len(text)
    assert num_bytes / num_steps <= 700
    num_checkpoints = sum('"Checkpointed"' in text[:80] for text in texts)
    assert num_checkpoints >= 5
    assert num_checkpoint_bytes / num_checkpoints <= 345 * NUM_MANY_WORKERS
    assert sum('"kind": "straggler"' in text for text in texts) == 1
    states = [json.loads(text)["ControllerState"] for text in texts if '"ControllerState"' in text]
    without_uploads = [
        {**state, "checkpoints": {**state.get("checkpoints", {}), "uploads": {}}}
        for state in states
    ]
    sizes = [len(json.dumps(state)) for state in without_uploads]
    assert len(sizes) >= 2 and max(sizes) <= 1.01 * min(sizes)


def test_short_reports_of_compute_times_replay_to_the_same_state(
    tmp_path: Path,
) -> None:
    """Each report has the straggler; only some have the times of the others."""
    policy = replace(long_run_policy(32), straggler_reports=10**6)
    run = LongRun(tmp_path / "run", 910, 20.0, policy, slow_rank=1)
    run.write()
    held_lines = run.writer.before(Woke(), run.core.state)
    texts = [*lines_of(tmp_path / "run"), *map(json.dumps, held_lines)]
    reports = [json.loads(text) for text in texts if '"event": "ComputeTimed"' in text]
    num_whole = sum(bool(report["compute_s"]) for report in reports)
    assert 1 < num_whole < len(reports) - 1
    assert all(len(report["slow"]) == 1 for report in reports if not report["compute_s"])
    replay = replay_lines(texts)
    assert encode(replay.core.state) == encode(run.core.state)
    [num_slow] = run.core.state.stragglers.num_slow.values()
    assert num_slow == 910 // policy.straggler_every


def test_state_of_the_controller_does_not_grow_with_the_steps(tmp_path: Path) -> None:
    """All checkpoints are kept, and all orders of one generation."""
    policy = replace(POLICY, keep_last=0, checkpoint_auto=False)
    sizes = []
    for num_steps in (2_000, 6_000):
        every = Every(loss=500, evaluation=5, checkpoint=5)
        run = LongRun(tmp_path / str(num_steps), num_steps, policy=policy, every=every)
        run.write()
        texts = lines_of(tmp_path / str(num_steps))
        sizes.append(len(texts[newest_full_state(texts)]))
        assert len(run.core.state.checkpoints.saved) <= 128
        kinds = [type(order) for order in run.writer.unfinished.orders]
        assert kinds in ([Resume], [Resume, RequestCheckpoint])
        assert not run.writer.unfinished.removals
    assert sizes[1] <= 1.1 * sizes[0]


class JournaledCore:
    """A core and its journal, one event at a time."""

    def __init__(self, num_steps: int = 1000) -> None:
        self.core, self.writer, self.now = Core(), JournalWriter(), 0.0
        self.lines: list[dict[str, Any]] = []
        self.deliver(opening(num_steps))

    def deliver(self, event: Event, answers: bool = True) -> None:
        inbox = [event]
        while inbox:
            event = inbox.pop(0)
            self.now += 0.001
            lines = self.writer.before(event, self.core.state)
            commands = self.core.step(self.now, event)
            lines += self.writer.after(self.now, event, commands, self.core.state)
            self.lines += json.loads(json.dumps(lines))
            for command in commands if answers else ():
                inbox += answers_to(command, self.core.state.committed_step)

    def commit(self, num_steps: int) -> None:
        for _ in range(num_steps):
            state = self.core.state
            self.deliver(step_of(state.committed_step + 1, state.generation, self.now))

    def names(self) -> list[str]:
        return [
            line.get("event") or line.get("command") or ("steps" if "steps" in line else "state")
            for line in self.lines
        ]


def test_first_step_with_whole_snapshots_is_written_at_once() -> None:
    """From that line a reader knows since when a loss costs little; other steps are held back."""
    journaled = JournaledCore()
    journaled.commit(5)
    assert journaled.names().count("StepCommitted") == 1, "the first step of the generation"
    state = journaled.core.state
    state.snapshots.placement = Placement(copies=dict.fromkeys(state.live.members(), ("n0",)))
    step = step_of(state.committed_step + 1, state.generation, journaled.now)
    whole = replace(step.vote, num_snapshots=len(state.live.members()))
    journaled.deliver(replace(step, vote=whole))
    assert journaled.lines[-1]["vote"]["num_snapshots"] == len(state.live.members())
    journaled.commit(5)
    assert journaled.names().count("StepCommitted") == 2


def test_first_step_of_a_generation_is_written_at_once() -> None:
    journaled = JournaledCore()
    journaled.commit(1)
    assert journaled.names()[-2:] == ["state", "StepCommitted"]


def test_held_steps_are_written_before_the_next_line() -> None:
    journaled = JournaledCore()
    journaled.commit(3)
    journaled.deliver(Woke())
    assert journaled.names()[-3:] == ["StepCommitted", "steps", "Woke"]
    journaled.commit(MAX_HELD)
    journaled.deliver(Woke())
    assert journaled.names()[-2:] == ["state", "Woke"], (
        "so many steps take more bytes than the state"
    )
    times = [line["time"] for line in journaled.lines]
    assert times == sorted(times)


def test_full_state_contains_the_metrics_that_storage_lacks() -> None:
    journaled = JournaledCore()
    journaled.commit(500)
    [line] = journaled.writer.due(journaled.now + 3600.0, journaled.core.state, num_waiting=3)
    replay = Replay()
    replay.take(json.loads(json.dumps(line)))
    assert [report.record.step for report in replay.records] == [498, 499, 500]


def test_orders_to_form_are_dropped_once_a_step_has_committed() -> None:
    journaled = JournaledCore()
    kinds = [type(order) for order in journaled.writer.unfinished.orders]
    assert kinds == [Form, Reshard, Resume]
    journaled.commit(1)
    assert [type(order) for order in journaled.writer.unfinished.orders] == [Resume]


def test_confirmed_removals_are_dropped() -> None:
    unfinished = PendingCommands()
    unfinished.note(Woke(), [DropCheckpoints(((1, 1), (2, 1))), SetAside(3, 1)])
    unfinished.note(Woke(), [DropCheckpoints(((2, 1), (4, 1)))])
    unfinished.note(CheckpointsRemoved(((1, 1), (2, 1))), [])
    assert unfinished.commands_to_repeat(set()) == [DropCheckpoints(((4, 1),)), SetAside(3, 1)]
    unfinished.note(CheckpointsRemoved(((3, 1), (4, 1))), [])
    assert unfinished.commands_to_repeat(set()) == []


def test_only_the_newest_checkpoint_request_is_kept_within_a_session() -> None:
    unfinished = PendingCommands()
    for step in range(1000):
        unfinished.note(Woke(), [RequestCheckpoint(1, ("w0",), step)])
    unfinished.note(Woke(), [StopWorker("w0", "gone"), Stopped("completed", 5)])
    assert unfinished.commands_to_repeat({"w0"}) == [
        StopWorker("w0", "gone"),
        RequestCheckpoint(1, ("w0",), 999),
    ]
    unfinished.drop_ended(set())
    assert not unfinished.stops and unfinished.stopped
    new_opening = opening(5)
    assert isinstance(new_opening, RunOpened)
    unfinished.note(new_opening, [])
    assert unfinished == PendingCommands()


def test_void_implied_by_a_new_one_is_dropped() -> None:
    state = ControllerState(
        generation=7,
        checkpoints=CheckpointDuty(
            voided=(VoidedCheckpoints(10, 2), VoidedCheckpoints(50, 3), VoidedCheckpoints(40, 5))
        ),
    )
    void_after(state, 40)
    assert state.checkpoints.voided == (VoidedCheckpoints(10, 2), VoidedCheckpoints(40, 8))


def catch_up_steps(journaled: JournaledCore, num_steps: int, phase: type) -> None:
    """Commit `num_steps` steps from records that a worker sends, as a shell does."""
    core, writer = journaled.core, journaled.writer
    generation, target = core.state.generation, core.state.committed_step + num_steps
    if phase is Running:
        event: Event = step_of(target, generation, journaled.now)
    else:
        journaled.deliver(WorkerLost("w0", "killed"), answers=False)
        for worker in ("w1", "w2", "w3"):
            journaled.deliver(Quiesced(worker, generation, target), answers=False)
        event = Woke()
    journaled.deliver(event, answers=False)
    while (catch_up := core.state.steps.catch_up) is not None:
        assert isinstance(core.state.phase, phase)
        first = core.state.committed_step + 1
        steps = range(first, min(first + NUM_SENT_RECORDS, target + 1))
        records = tuple(step_of(step, generation, journaled.now).record for step in steps)
        event = RecordsSent(catch_up.worker, core.state.generation, records)
        journaled.deliver(event, answers=False)
        journaled.lines += writer.due(journaled.now, core.state)


@pytest.mark.parametrize(
    ("phase", "num_steps"),
    [
        (Running, 20_000),
        (Aborting, 20_000),
        pytest.param(Running, 100_000, marks=pytest.mark.slow),
    ],
)
def test_replay_is_short_also_after_a_long_absence(phase: type, num_steps: int) -> None:
    """The workers were `num_steps` ahead; the controller has their records and dies again."""
    journaled = JournaledCore(2 * num_steps)
    journaled.commit(10)
    catch_up_steps(journaled, num_steps, phase)
    assert journaled.core.state.committed_step == num_steps + 10
    newest = max(n for n, line in enumerate(journaled.lines) if "ControllerState" in line)
    replay = Replay()
    replay.take(journaled.lines[newest])
    first = replay.core.state.committed_step
    for line in journaled.lines[newest + 1 :]:
        replay.take(line)
    assert encode(replay.core.state) == encode(journaled.core.state)
    num_replayed = replay.core.state.committed_step - first
    assert num_replayed <= MAX_REPLAYED + NUM_SENT_RECORDS
    assert replay.num_events >= num_replayed


def test_journal_of_another_version_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    line = '{"time": 1.0, "format": 1, "event": "StoreReady"}\n'
    (tmp_path / JOURNAL).write_text(line)
    run = DiskStorage(tmp_path)
    lease = claim(run)
    with pytest.raises(UnreadableJournal, match="format 1"):
        open_journal(LineLog(run, JOURNAL), lease)
    lease.release()
    assert (tmp_path / JOURNAL).read_text() == line
