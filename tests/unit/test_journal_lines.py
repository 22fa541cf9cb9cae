"""The journal of long runs: what a step costs, where a replay begins, what is remembered."""

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
    opening,
    step_of,
    users_policy,
)

from elastic.controller.core import Core
from elastic.duties.rollback import distrust
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
from elastic.protocol.pending_commands import Unfinished
from elastic.protocol.phases import Aborting, Running
from elastic.protocol.step_records import NUM_SENT_RECORDS, RecordsSent
from elastic.protocol.wire import encode
from elastic.replay.journal_lines import MAX_HELD, MAX_REPLAYED, JournalWriter
from elastic.replay.replay import Replay
from elastic.reshard.snapshot_placement import Placement


def lines_of(folder: Path) -> list[str]:
    return (folder / "journal.jsonl").read_text().splitlines()


def replayed(texts: list[str]) -> Replay:
    replay = Replay()
    for text in texts:
        replay.take(json.loads(text))
    return replay


def newest_full_state(texts: list[str]) -> int:
    return max(index for index, text in enumerate(texts) if '"ControllerState"' in text)


@pytest.mark.parametrize(("step_s", "most_bytes"), [(20.0, 350), (1.0, 125), (0.001, 15)])
def test_a_step_costs_the_journal_few_bytes(
    tmp_path: Path, step_s: float, most_bytes: float
) -> None:
    """Under the policy that users get: with reports of compute times, and checkpoints by time."""
    num_steps = 3 * MAX_REPLAYED
    LongRun(tmp_path / "run", num_steps, step_s).write()
    assert sum(map(len, lines_of(tmp_path / "run"))) / num_steps <= most_bytes


@pytest.mark.parametrize("step_s", [20.0, 1.0, 0.001])
def test_a_replay_begins_at_the_newest_full_state_and_is_short(
    tmp_path: Path, step_s: float
) -> None:
    """Beyond every buffer: held steps, kept records, two lost workers."""
    run = LongRun(tmp_path / "run", 5_000, step_s, every=Every(loss=2_000))
    run.write()
    texts = lines_of(tmp_path / "run")
    newest = replayed(texts[newest_full_state(texts) :])
    whole = replayed(texts)
    assert encode(newest.core.state) == encode(whole.core.state)
    assert newest.again() == whole.again()
    assert newest.num_events <= MAX_REPLAYED
    lost = run.core.state.committed_step - newest.core.state.committed_step
    assert lost <= min(MAX_HELD, 1 + 31 / step_s), "only reports that workers repeat"


def test_a_thousand_workers_cost_the_journal_few_bytes_a_step_and_nothing_grows(
    tmp_path: Path,
) -> None:
    """One of them is a straggler all the time."""
    num_steps, policy = 3_000, users_policy(NUM_MANY_WORKERS)
    LongRun(tmp_path / "run", num_steps, policy=policy, slow_rank=1).write()
    texts = lines_of(tmp_path / "run")
    resumed = next(i for i, text in enumerate(texts) if '"command": "Resume"' in text)
    texts = texts[resumed + 2 :]
    of_checkpoints = ('"PartWritten"', '"PublishCheckpoint"')
    num_bytes, num_bytes_of_checkpoints = 0, 0
    for text in texts:
        if any(kind in text[:80] for kind in of_checkpoints):
            num_bytes_of_checkpoints += len(text)
        else:
            num_bytes += len(text)
    assert num_bytes / num_steps <= 700
    num_checkpoints = sum('"Checkpointed"' in text[:80] for text in texts)
    assert num_checkpoints >= 5
    assert num_bytes_of_checkpoints / num_checkpoints <= 345 * NUM_MANY_WORKERS
    assert sum('"kind": "straggler"' in text for text in texts) == 1
    states = [json.loads(text)["ControllerState"] for text in texts if '"ControllerState"' in text]
    without_uploads = [
        {**state, "checkpoints": {**state.get("checkpoints", {}), "uploads": {}}}
        for state in states
    ]
    sizes = [len(json.dumps(state)) for state in without_uploads]
    assert len(sizes) >= 2 and max(sizes) <= 1.01 * min(sizes)


def test_a_journal_with_short_reports_of_compute_times_replays_to_the_same_state(
    tmp_path: Path,
) -> None:
    """The straggler is in each report, the others' times only in some."""
    policy = replace(users_policy(32), straggler_reports=10**6)
    run = LongRun(tmp_path / "run", 910, 20.0, policy, slow_rank=1)
    run.write()
    held = run.writer.before(Woke(), run.core.state)
    texts = [*lines_of(tmp_path / "run"), *map(json.dumps, held)]
    reports = [json.loads(text) for text in texts if '"event": "ComputeTimed"' in text]
    num_whole = sum(bool(report["compute_s"]) for report in reports)
    assert 1 < num_whole < len(reports) - 1
    assert all(len(report["slow"]) == 1 for report in reports if not report["compute_s"])
    replay = replayed(texts)
    assert encode(replay.core.state) == encode(run.core.state)
    [num_slow] = run.core.state.stragglers.num_slow.values()
    assert num_slow == 910 // policy.straggler_every


def test_nothing_that_the_controller_keeps_grows_with_the_steps(tmp_path: Path) -> None:
    """With every checkpoint kept and the orders of one generation."""
    policy = replace(POLICY, keep_last=0, checkpoint_auto=False)
    sizes = []
    for num_steps in (2_000, 6_000):
        every = Every(loss=500, evaluation=5, checkpoint=5)
        run = LongRun(tmp_path / str(num_steps), num_steps, policy=policy, every=every)
        run.write()
        full = lines_of(tmp_path / str(num_steps))
        sizes.append(len(full[newest_full_state(full)]))
        assert len(run.core.state.checkpoints.saved) <= 128
        kinds = [type(order) for order in run.writer.unfinished.orders]
        assert kinds in ([Resume], [Resume, RequestCheckpoint])
        assert not run.writer.unfinished.removals
    assert sizes[1] <= 1.1 * sizes[0]


class Driven:
    """A core and its journal, driven event by event."""

    def __init__(self, num_steps: int = 1000) -> None:
        self.core, self.writer, self.now = Core(), JournalWriter(), 0.0
        self.lines: list[dict[str, Any]] = []
        self.hear(opening(num_steps))

    def hear(self, event: Event, answers: bool = True) -> None:
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
            self.hear(step_of(state.committed_step + 1, state.generation, self.now))

    def names(self) -> list[str]:
        return [
            line.get("event") or line.get("command") or ("steps" if "steps" in line else "state")
            for line in self.lines
        ]


def test_the_first_step_by_which_all_snapshots_are_whole_is_written_at_once() -> None:
    """It tells a reader since when a loss costs little; the steps beside it are held back."""
    run = Driven()
    run.commit(5)
    assert run.names().count("StepCommitted") == 1, "the first of the generation"
    state = run.core.state
    state.snapshots.placement = Placement(copies=dict.fromkeys(state.live.members(), ("n0",)))
    step = step_of(state.committed_step + 1, state.generation, run.now)
    whole = replace(step.vote, num_snapshots=len(state.live.members()))
    run.hear(replace(step, vote=whole))
    assert run.lines[-1]["vote"]["num_snapshots"] == len(state.live.members())
    run.commit(5)
    assert run.names().count("StepCommitted") == 2


def test_the_first_step_of_a_generation_is_written_at_once() -> None:
    driven = Driven()
    driven.commit(1)
    assert driven.names()[-2:] == ["state", "StepCommitted"]


def test_held_steps_come_before_what_follows_them() -> None:
    driven = Driven()
    driven.commit(3)
    driven.hear(Woke())
    assert driven.names()[-3:] == ["StepCommitted", "steps", "Woke"]
    driven.commit(MAX_HELD)
    driven.hear(Woke())
    assert driven.names()[-2:] == ["state", "Woke"], "so many take more bytes than the state"
    times = [line["time"] for line in driven.lines]
    assert times == sorted(times)


def test_a_full_state_has_the_metrics_that_storage_lacks() -> None:
    driven = Driven()
    driven.commit(500)
    [line] = driven.writer.due(driven.now + 3600.0, driven.core.state, num_waiting=3)
    replay = Replay()
    replay.take(json.loads(json.dumps(line)))
    assert [told.record.step for told in replay.records] == [498, 499, 500]


def test_once_a_step_has_committed_nobody_is_told_to_form_again() -> None:
    driven = Driven()
    kinds = [type(order) for order in driven.writer.unfinished.orders]
    assert kinds == [Form, Reshard, Resume]
    driven.commit(1)
    assert [type(order) for order in driven.writer.unfinished.orders] == [Resume]


def test_confirmed_removals_are_forgotten() -> None:
    unfinished = Unfinished()
    unfinished.note(Woke(), [DropCheckpoints(((1, 1), (2, 1))), SetAside(3, 1)])
    unfinished.note(Woke(), [DropCheckpoints(((2, 1), (4, 1)))])
    unfinished.note(CheckpointsRemoved(((1, 1), (2, 1))), [])
    assert unfinished.again(set()) == [DropCheckpoints(((4, 1),)), SetAside(3, 1)]
    unfinished.note(CheckpointsRemoved(((3, 1), (4, 1))), [])
    assert unfinished.again(set()) == []


def test_only_the_newest_wish_counts_and_a_new_session_begins_empty() -> None:
    unfinished = Unfinished()
    for step in range(1000):
        unfinished.note(Woke(), [RequestCheckpoint(1, ("w0",), step)])
    unfinished.note(Woke(), [StopWorker("w0", "gone"), Stopped("completed", 5)])
    assert unfinished.again({"w0"}) == [
        StopWorker("w0", "gone"),
        RequestCheckpoint(1, ("w0",), 999),
    ]
    unfinished.drop_ended(set())
    assert not unfinished.stops and unfinished.stopped
    opened = opening(5)
    assert isinstance(opened, RunOpened)
    unfinished.note(opened, [])
    assert unfinished == Unfinished()


def test_voids_that_a_new_one_implies_are_forgotten() -> None:
    state = ControllerState(
        generation=7,
        checkpoints=CheckpointDuty(
            voided=(VoidedCheckpoints(10, 2), VoidedCheckpoints(50, 3), VoidedCheckpoints(40, 5))
        ),
    )
    distrust(state, 40)
    assert state.checkpoints.voided == (VoidedCheckpoints(10, 2), VoidedCheckpoints(40, 8))


def caught_up(driven: Driven, num_steps: int, phase: type) -> None:
    """Commit so many steps out of records that a worker sends, as a shell does it."""
    core, writer = driven.core, driven.writer
    generation, target = core.state.generation, core.state.committed_step + num_steps
    if phase is Running:
        event: Event = step_of(target, generation, driven.now)
    else:
        driven.hear(WorkerLost("w0", "killed"), answers=False)
        for worker in ("w1", "w2", "w3"):
            driven.hear(Quiesced(worker, generation, target), answers=False)
        event = Woke()
    driven.hear(event, answers=False)
    while (catch_up := core.state.steps.catch_up) is not None:
        assert isinstance(core.state.phase, phase)
        first = core.state.committed_step + 1
        steps = range(first, min(first + NUM_SENT_RECORDS, target + 1))
        records = tuple(step_of(step, generation, driven.now).record for step in steps)
        event = RecordsSent(catch_up.worker, core.state.generation, records)
        driven.hear(event, answers=False)
        driven.lines += writer.due(driven.now, core.state)


@pytest.mark.parametrize(
    ("phase", "num_steps"),
    [
        (Running, 20_000),
        (Aborting, 20_000),
        pytest.param(Running, 100_000, marks=pytest.mark.slow),
    ],
)
def test_a_replay_is_short_also_after_a_long_absence(phase: type, num_steps: int) -> None:
    """The workers were that far ahead; the controller has their records and dies again."""
    driven = Driven(2 * num_steps)
    driven.commit(10)
    caught_up(driven, num_steps, phase)
    assert driven.core.state.committed_step == num_steps + 10
    newest = max(n for n, line in enumerate(driven.lines) if "ControllerState" in line)
    replay = Replay()
    replay.take(driven.lines[newest])
    first = replay.core.state.committed_step
    for line in driven.lines[newest + 1 :]:
        replay.take(line)
    assert encode(replay.core.state) == encode(driven.core.state)
    num_replayed = replay.core.state.committed_step - first
    assert num_replayed <= MAX_REPLAYED + NUM_SENT_RECORDS
    assert replay.num_events >= num_replayed
