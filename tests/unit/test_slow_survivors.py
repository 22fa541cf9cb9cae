"""Under the default policy an abort does not end slow but healthy survivors."""

from __future__ import annotations

from dataclasses import replace

import pytest
from test_hangs import SteppedCore, commit_steps
from users_policy import users_policy

from elastic.protocol.commands import Abort, RollForward
from elastic.protocol.controller_events import ControllerRestarted, WorkerAnswered, WorkersStalled
from elastic.protocol.events import (
    GroupFormed,
    Quiesced,
    RolledForward,
    Saved,
    StateReady,
    StopRequested,
    WorkerLost,
    WorkerSuspected,
)
from elastic.protocol.phases import Ended, Forming, Resharding
from elastic.protocol.votes import StepRecord, Vote
from pipelines.run.options import policy_of
from pipelines.settings import (
    CheckpointSettings,
    FailureSettings,
    SnapshotSettings,
    TrainSettings,
)

SAVED = (Saved(1, 1, "checkpoint"),)
PATIENCE_S = users_policy().collective_timeout_s


def wait_for_hang_abort(stepped: SteppedCore) -> float:
    """Let the current step hang; returns the time of the abort."""
    stepped.wake_until(Abort)
    return stepped.now


@pytest.mark.parametrize("num_workers", [8, 1000])
@pytest.mark.parametrize("saved", [(), SAVED], ids=["unsaved", "saved"])
def test_hang_ends_one_worker_at_a_time(num_workers: int, saved: tuple[Saved, ...]) -> None:
    """No worker unwinds for over a minute: the core ends the first; the others get more time."""
    stepped = commit_steps(SteppedCore(num_workers, saved), *((2, 3) if saved else (1, 2, 3)))
    started = wait_for_hang_abort(stepped)
    others = [w for w in stepped.workers if w != "w0"]
    ended_at = stepped.play([stepped.unwind(w, 90.0) for w in others])
    assert ended_at == {"w0": pytest.approx(started + 60.0)}
    assert isinstance(stepped.core.state.phase, Forming)


def test_1000_workers_that_unwind_within_half_a_minute_outlive_a_hang() -> None:
    stepped = commit_steps(SteppedCore(1000), 1, 2)
    wait_for_hang_abort(stepped)
    slow = [stepped.unwind(f"w{i}", 16.0 + 14.0 * i / 998) for i in range(1, 999)]
    reports = [stepped.unwind("w0", 0.2), *slow]
    assert list(stepped.play(reports)) == ["w999"]


def test_first_of_several_stalled_workers_is_ended() -> None:
    stepped = commit_steps(SteppedCore(8), 1, 2)
    stepped.deliver(WorkersStalled(stepped.core.state.generation - 1, ("w1",)))
    stepped.deliver(WorkersStalled(stepped.core.state.generation, ("w5", "w1", "w2")))
    started = wait_for_hang_abort(stepped)
    others = [w for w in stepped.workers if w != "w5"]
    reports = [stepped.unwind("w0", 0.2), *(stepped.unwind(w, 100.0) for w in others[1:])]
    assert stepped.play(reports) == {"w5": pytest.approx(started + 0.2 + 60.0)}


def test_last_unwinding_worker_is_not_ended_once_the_hanging_one_is_lost() -> None:
    stepped = commit_steps(SteppedCore(3), 1, 2)
    wait_for_hang_abort(stepped)
    ended_at = stepped.play(
        [
            stepped.unwind("w0", 0.2),
            (stepped.now + 1.0, WorkerLost("w2", "killed")),
            stepped.unwind("w1", 50.0),
        ]
    )
    assert not ended_at


def test_silent_worker_causes_the_end_of_no_other_worker_despite_a_checkpoint() -> None:
    """The core waits for the silent worker, which holds a shard; another one unwinds even later."""
    stepped = commit_steps(SteppedCore(8, SAVED, layout="fsdp=8"), 2, 3)
    stepped.deliver(WorkerSuspected("w7", "silent"))
    started = stepped.now
    slow_s = (0.2, 0.2, 0.2, 0.2, 0.2, 0.2, 200.0)
    ended_at = stepped.play([stepped.unwind(f"w{i}", s) for i, s in enumerate(slow_s)])
    assert ended_at == {"w7": pytest.approx(started + 60.0)}


@pytest.mark.parametrize("num_workers", [8, 1000])
def test_workers_that_answer_again_are_no_suspects(num_workers: int) -> None:
    """The network of the controller stalls for a while: all workers but one seem silent."""
    stepped = commit_steps(SteppedCore(num_workers), 1, 2)
    first, *others = stepped.workers
    stepped.deliver(*(WorkerSuspected(worker, "silent") for worker in others))
    answers = [(stepped.now + 0.5, WorkerAnswered(worker)) for worker in others]
    unwind_reports = [stepped.unwind(worker, 20.0) for worker in others]
    assert not stepped.play([stepped.unwind(first, 0.1), *answers, *unwind_reports])
    assert isinstance(stepped.core.state.phase, Forming)


def test_suspect_that_unwinds_is_not_ended_while_it_rolls_forward() -> None:
    stepped = commit_steps(SteppedCore(4), 1, 2)
    generation, now = stepped.core.state.generation, stepped.now
    vote = Vote(3, 1.0, 1, 1.0, 4)
    record = StepRecord(0.0, 3, generation, 4, 1.0, 1, 0.1, 1.0, 0.5, skipped=False)
    stepped.deliver(WorkerSuspected("w1", "silent"))
    stepped.deliver(Quiesced("w0", generation, 3, vote, records=(record,)))
    behind = [Quiesced(w, generation, 2, gradients_complete=True) for w in ("w1", "w2", "w3")]
    commands = stepped.deliver(*behind)
    assert any(isinstance(command, RollForward) for command in commands)
    rolled_forward = [(now + 20.0, RolledForward(w, generation, record)) for w in ("w1", "w2")]
    assert not stepped.play([(now + 5.0, WorkerLost("w3", "killed")), *rolled_forward])


def test_stop_after_a_hang_ends_one_worker_and_lets_the_others_save() -> None:
    stepped = commit_steps(SteppedCore(8), 1, 2)
    wait_for_hang_abort(stepped)
    stepped.deliver(WorkersStalled(stepped.core.state.generation, ("w7",)))
    reports = [stepped.unwind("w0", 0.5), *(stepped.unwind(f"w{i}", 20.0 + i) for i in range(1, 7))]
    ended_at = stepped.play([*reports, (stepped.now + 0.6, StopRequested("SIGINT"))])
    assert list(ended_at) == ["w7"]
    assert stepped.core.state.ending and not isinstance(stepped.core.state.phase, Ended)


def test_blocked_workers_are_ended_after_the_collective_timeout() -> None:
    stepped = commit_steps(SteppedCore(8), 1, 2)
    started = stepped.now
    stepped.deliver(WorkerLost("w7", "killed"))
    ended_at = stepped.play([stepped.unwind("w0", 0.2)])
    assert ended_at == {f"w{i}": pytest.approx(started + PATIENCE_S) for i in range(1, 7)}


def test_deadlines_of_an_abort_move_by_the_time_that_the_controller_was_down() -> None:
    stepped = commit_steps(SteppedCore(3), 1, 2)
    wait_for_hang_abort(stepped)
    stepped.deliver(stepped.unwind("w0", 0.0)[1])
    deadline, stopped_at = stepped.core.next_deadline(), stepped.now
    assert deadline is not None
    stepped.now += 1000.0
    stepped.deliver(ControllerRestarted(2, stopped_at))
    assert stepped.core.next_deadline() == pytest.approx(deadline + 1000.0)
    stepped.deliver(WorkerSuspected("w1", "silent"), WorkerAnswered("w1"))
    assert stepped.core.next_deadline() == pytest.approx(deadline + 1000.0)


def form_after(stepped: SteppedCore, took_s: float) -> None:
    """Let all workers connect at the same moment, after `took_s`."""
    assert isinstance(stepped.core.state.phase, Forming)
    started = stepped.now
    while (deadline := stepped.core.next_deadline()) is not None and deadline < started + took_s:
        assert not any(isinstance(command, Abort) for command in stepped.wake()), "too late"
    stepped.now = started + took_s
    generation = stepped.core.state.generation
    members = stepped.core.state.phase.attempt.plan.participants
    stepped.deliver(*(GroupFormed(worker, generation) for worker in members))
    assert isinstance(stepped.core.state.phase, Resharding)
    stepped.deliver(*(StateReady(w, generation, 0, 0, 0.0, 1, 1, 2) for w in members))


def lose_worker(stepped: SteppedCore, worker: str) -> None:
    """Lose a worker; the others unwind at once."""
    stepped.deliver(WorkerLost(worker, "killed"))
    stepped.workers.remove(worker)
    reports = [stepped.unwind(other, 0.0) for other in stepped.workers]
    stepped.deliver(*(event for _, event in reports))


def test_1000_workers_may_take_a_minute_to_form() -> None:
    stepped = commit_steps(SteppedCore(1000), 1, 2)
    lose_worker(stepped, "w999")
    form_after(stepped, 60.0)
    assert stepped.core.state.forming.num_attempts == 1


def test_forming_timeout_is_a_multiple_of_recent_forming_times() -> None:
    stepped = commit_steps(SteppedCore(8), 1, 2)
    lose_worker(stepped, "w7")
    form_after(stepped, 29.0)
    lose_worker(stepped, "w6")
    form_after(stepped, 80.0)


def test_forming_timeout_grows_after_a_late_forming() -> None:
    """Twenty workers on a busy cluster need 100 s for each forming, and the run does not fail."""
    stepped = commit_steps(SteppedCore(20), 1, 2)
    lose_worker(stepped, "w19")
    abort = stepped.wake_until(Abort)
    assert isinstance(abort, Abort) and "Forming timed out" in abort.cause
    stepped.deliver(*(stepped.unwind(worker, 0.0)[1] for worker in stepped.workers))
    abort = stepped.wake_until(Abort)
    assert isinstance(abort, Abort)
    stepped.deliver(*(stepped.unwind(worker, 0.0)[1] for worker in stepped.workers))
    form_after(stepped, 100.0)


def test_forming_timeout_does_not_grow_beyond_that_of_collectives() -> None:
    """A worker never connects, attempt after attempt."""
    stepped = commit_steps(SteppedCore(20), 1, 2)
    lose_worker(stepped, "w19")
    waits_s = []
    for _ in range(stepped.core.state.policy.max_attempts - 2):
        phase = stepped.core.state.phase
        assert isinstance(phase, Forming)
        waits_s.append(phase.deadline - stepped.now)
        stepped.wake_until(Abort)
        stepped.deliver(*(stepped.unwind(worker, 0.0)[1] for worker in stepped.workers))
    assert waits_s == pytest.approx([30.0, 90.0, 270.0, 300.0, 300.0, 300.0])


def test_time_without_a_controller_does_not_count_as_forming_time() -> None:
    stepped = commit_steps(SteppedCore(8), 1, 2)
    lose_worker(stepped, "w7")
    stopped_at = stepped.now
    stepped.now += 500.0
    stepped.deliver(ControllerRestarted(2, stopped_at))
    form_after(stepped, 2.0)
    assert stepped.core.state.forming.recent_form_s[-1] == pytest.approx(2.0)


def test_every_deadline_of_failure_detection_is_a_setting() -> None:
    changes = {
        "form_timeout_s": 31.0,
        "form_timeout_per_worker_s": 0.2,
        "form_factor": 4.0,
        "reshard_timeout_s": 601.0,
        "first_step_timeout_s": 602.0,
        "hang_factor": 11.0,
        "hang_share": 0.5,
        "max_attempts": 9,
    }
    settings = TrainSettings(
        failure=FailureSettings(**changes),
        snapshot=SnapshotSettings(server_timeout_s=12.0),
        checkpoint=CheckpointSettings(save_timeout_s=301.0, save_backoff_s=6.0),
    )
    changes |= {
        "snapshot_server_timeout_s": 12.0,
        "save_timeout_s": 301.0,
        "save_backoff_s": 6.0,
    }
    plain = policy_of(TrainSettings(), 1, 2, "run")
    assert all(getattr(plain, name) != value for name, value in changes.items())
    assert policy_of(settings, 1, 2, "run") == replace(plain, **changes)
