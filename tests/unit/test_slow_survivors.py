"""Survivors that are slow and healthy outlive an abort, with the policy that users get."""

from __future__ import annotations

from dataclasses import replace

import pytest
from test_hangs import Driven, committed
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


def hanging(driven: Driven) -> float:
    """A step that nobody ends; returns when that was noticed."""
    driven.wake_until(Abort)
    return driven.now


@pytest.mark.parametrize("num_workers", [8, 1000])
@pytest.mark.parametrize("saved", [(), SAVED], ids=["unsaved", "saved"])
def test_a_hang_ends_one_worker_at_a_time(num_workers: int, saved: tuple[Saved, ...]) -> None:
    """Nobody unwinds for over a minute: the first may be ended, and then the others get time."""
    driven = committed(Driven(num_workers, saved), *((2, 3) if saved else (1, 2, 3)))
    began = hanging(driven)
    others = [w for w in driven.workers if w != "w0"]
    ended = driven.play([driven.unwind(w, 90.0) for w in others])
    assert ended == {"w0": pytest.approx(began + 60.0)}
    assert isinstance(driven.core.state.phase, Forming)


def test_a_thousand_that_take_half_a_minute_to_unwind_outlive_a_hang() -> None:
    driven = committed(Driven(1000), 1, 2)
    hanging(driven)
    slow = [driven.unwind(f"w{i}", 16.0 + 14.0 * i / 998) for i in range(1, 999)]
    reports = [driven.unwind("w0", 0.2), *slow]
    assert list(driven.play(reports)) == ["w999"]


def test_of_several_the_one_that_came_to_a_standstill_first_is_ended() -> None:
    driven = committed(Driven(8), 1, 2)
    driven.tell(WorkersStalled(driven.core.state.generation - 1, ("w1",)))
    driven.tell(WorkersStalled(driven.core.state.generation, ("w5", "w1", "w2")))
    began = hanging(driven)
    others = [w for w in driven.workers if w != "w5"]
    reports = [driven.unwind("w0", 0.2), *(driven.unwind(w, 100.0) for w in others[1:])]
    assert driven.play(reports) == {"w5": pytest.approx(began + 0.2 + 60.0)}


def test_the_last_that_unwinds_is_not_ended_when_the_one_that_hung_is_gone() -> None:
    driven = committed(Driven(3), 1, 2)
    hanging(driven)
    ended = driven.play(
        [
            driven.unwind("w0", 0.2),
            (driven.now + 1.0, WorkerLost("w2", "killed")),
            driven.unwind("w1", 50.0),
        ]
    )
    assert not ended


def test_a_worker_that_does_not_answer_costs_no_other_its_life_though_a_checkpoint_is_there() -> (
    None
):
    """It holds a part of the state, so that it is waited for; another takes longer than that."""
    driven = committed(Driven(8, SAVED, layout="fsdp=8"), 2, 3)
    driven.tell(WorkerSuspected("w7", "silent"))
    began = driven.now
    slow_s = (0.2, 0.2, 0.2, 0.2, 0.2, 0.2, 200.0)
    ended = driven.play([driven.unwind(f"w{i}", s) for i, s in enumerate(slow_s)])
    assert ended == {"w7": pytest.approx(began + 60.0)}


@pytest.mark.parametrize("num_workers", [8, 1000])
def test_workers_that_answer_again_are_no_suspects(num_workers: int) -> None:
    """The controller's network stands still for a while: all but one seem silent, and none is."""
    driven = committed(Driven(num_workers), 1, 2)
    first, *others = driven.workers
    driven.tell(*(WorkerSuspected(worker, "silent") for worker in others))
    answers = [(driven.now + 0.5, WorkerAnswered(worker)) for worker in others]
    unwound = [driven.unwind(worker, 20.0) for worker in others]
    assert not driven.play([driven.unwind(first, 0.1), *answers, *unwound])
    assert isinstance(driven.core.state.phase, Forming)


def test_a_suspect_that_unwinds_is_not_ended_while_it_rolls_forward() -> None:
    driven = committed(Driven(4), 1, 2)
    generation, now = driven.core.state.generation, driven.now
    vote = Vote(3, 1.0, 1, 1.0, 4)
    record = StepRecord(0.0, 3, generation, 4, 1.0, 1, 0.1, 1.0, 0.5, skipped=False)
    driven.tell(WorkerSuspected("w1", "silent"))
    driven.tell(Quiesced("w0", generation, 3, vote, records=(record,)))
    behind = [Quiesced(w, generation, 2, gradients_complete=True) for w in ("w1", "w2", "w3")]
    commands = driven.tell(*behind)
    assert any(isinstance(command, RollForward) for command in commands)
    settled = [(now + 20.0, RolledForward(w, generation, record)) for w in ("w1", "w2")]
    assert not driven.play([(now + 5.0, WorkerLost("w3", "killed")), *settled])


def test_a_stop_after_a_hang_ends_one_worker_and_lets_the_others_save() -> None:
    driven = committed(Driven(8), 1, 2)
    hanging(driven)
    driven.tell(WorkersStalled(driven.core.state.generation, ("w7",)))
    reports = [driven.unwind("w0", 0.5), *(driven.unwind(f"w{i}", 20.0 + i) for i in range(1, 7))]
    ended = driven.play([*reports, (driven.now + 0.6, StopRequested("SIGINT"))])
    assert list(ended) == ["w7"]
    assert driven.core.state.ending and not isinstance(driven.core.state.phase, Ended)


def test_all_that_stay_blocked_are_ended_after_the_time_limit_of_collectives() -> None:
    driven = committed(Driven(8), 1, 2)
    began = driven.now
    driven.tell(WorkerLost("w7", "killed"))
    ended = driven.play([driven.unwind("w0", 0.2)])
    assert ended == {f"w{i}": pytest.approx(began + PATIENCE_S) for i in range(1, 7)}


def test_deadlines_of_an_abort_move_by_the_time_that_the_controller_was_away() -> None:
    driven = committed(Driven(3), 1, 2)
    hanging(driven)
    driven.tell(driven.unwind("w0", 0.0)[1])
    due, stopped_at = driven.core.next_deadline(), driven.now
    assert due is not None
    driven.now += 1000.0
    driven.tell(ControllerRestarted(2, stopped_at))
    assert driven.core.next_deadline() == pytest.approx(due + 1000.0)
    driven.tell(WorkerSuspected("w1", "silent"), WorkerAnswered("w1"))
    assert driven.core.next_deadline() == pytest.approx(due + 1000.0)


def form_in(driven: Driven, took_s: float) -> None:
    """All workers connect, at the same moment."""
    assert isinstance(driven.core.state.phase, Forming)
    began = driven.now
    while (deadline := driven.core.next_deadline()) is not None and deadline < began + took_s:
        assert not any(isinstance(command, Abort) for command in driven.wake()), "too late"
    driven.now = began + took_s
    generation = driven.core.state.generation
    members = driven.core.state.phase.attempt.plan.participants
    driven.tell(*(GroupFormed(worker, generation) for worker in members))
    assert isinstance(driven.core.state.phase, Resharding)
    driven.tell(*(StateReady(w, generation, 0, 0, 0.0, 1, 1, 2) for w in members))


def lose(driven: Driven, worker: str) -> None:
    """It dies, and the others unwind at once."""
    driven.tell(WorkerLost(worker, "killed"))
    driven.workers.remove(worker)
    reports = [driven.unwind(other, 0.0) for other in driven.workers]
    driven.tell(*(event for _, event in reports))


def test_a_thousand_workers_may_take_a_minute_to_form() -> None:
    driven = committed(Driven(1000), 1, 2)
    lose(driven, "w999")
    form_in(driven, 60.0)
    assert driven.core.state.forming.num_attempts == 1


def test_forming_gets_a_multiple_of_what_it_took_in_this_run() -> None:
    driven = committed(Driven(8), 1, 2)
    lose(driven, "w7")
    form_in(driven, 29.0)
    lose(driven, "w6")
    form_in(driven, 80.0)


def test_the_next_forming_gets_longer_than_the_one_that_was_late() -> None:
    """Twenty workers on a busy cluster need 100 s each time, and the run does not fail."""
    driven = committed(Driven(20), 1, 2)
    lose(driven, "w19")
    late = driven.wake_until(Abort)
    assert isinstance(late, Abort) and "Forming timed out" in late.cause
    driven.tell(*(driven.unwind(worker, 0.0)[1] for worker in driven.workers))
    late = driven.wake_until(Abort)
    assert isinstance(late, Abort)
    driven.tell(*(driven.unwind(worker, 0.0)[1] for worker in driven.workers))
    form_in(driven, 100.0)


def test_a_controller_that_is_away_does_not_lengthen_the_measured_forming_time() -> None:
    driven = committed(Driven(8), 1, 2)
    lose(driven, "w7")
    stopped_at = driven.now
    driven.now += 500.0
    driven.tell(ControllerRestarted(2, stopped_at))
    form_in(driven, 2.0)
    assert driven.core.state.forming.recent_form_s[-1] == pytest.approx(2.0)


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
