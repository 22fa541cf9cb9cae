"""What belongs to one generation, session or lineage does not decide in a later one."""

from __future__ import annotations

from dataclasses import replace

from test_core import commit, deliver
from test_core_scripts import open_script
from test_hangs import SteppedCore
from test_loss_monitor import make_training_core, open_run
from users_policy import users_policy

from elastic.duties import loss_monitor
from elastic.duties.hang_recovery import hang_patience_s
from elastic.geometry.training_job import Job
from elastic.protocol.commands import DropCheckpoints, RollForward
from elastic.protocol.duty_records import PartFile
from elastic.protocol.events import (
    Checkpointed,
    Evaluated,
    PartWritten,
    Paused,
    Quiesced,
    RolledForward,
    Saved,
    StepCommitted,
    WorkerDraining,
    WorkerLost,
    WorkerReady,
)
from elastic.protocol.phases import Aborting, Pausing, Running, Waiting
from elastic.protocol.votes import StepRecord, Vote


def record_of(step: int, **changes: object) -> StepRecord:
    record = StepRecord(0.0, step, 1, 1, 1.0, 1, 0.1, 1.0, 0.5, skipped=False)
    return replace(record, **changes)


def test_vote_of_lost_workers_does_not_decide_the_step_that_others_compute_again() -> None:
    """w0 read the vote of step 3 and died before the controller had the record of step 2."""
    run = SteppedCore(1)
    run.commit(1)
    run.deliver(StepCommitted(1, record_of(3), Vote(3, 1.0, 1, 1.0, 1)), WorkerLost("w0", "killed"))
    run.workers = ["w1"]
    run.deliver(WorkerReady("w1", "node", 1))
    run.form()
    generation = run.core.state.generation
    assert isinstance(run.core.state.phase, Running) and run.core.state.steps.last_vote is None
    step = run.core.state.committed_step
    run.deliver(WorkerReady("w2", "node", 1))
    commands = run.deliver(WorkerLost("w1", "killed"), Quiesced("w1", generation, step))
    assert not any(isinstance(command, RollForward) for command in commands)


def test_best_checkpoint_of_an_earlier_session_is_kept() -> None:
    policy = users_policy(1, 1, keep_last=1, keep_best=1)
    core = make_training_core(keep_last=1, keep_best=1)
    core.state.checkpoints.held_out_losses = {"1": 0.1, "2": 0.2, "3": 0.5}
    saved = (Saved(1, 1, "step-1-g1"), Saved(3, 1, "step-3-g1"))
    open_run(core, policy, saved)
    assert core.state.checkpoints.held_out_losses == {"1": 0.1, "3": 0.5}
    generation = core.state.generation
    commit(core, 4)
    commands = deliver(core, Checkpointed(4, generation, f"step-4-g{generation}"))
    dropped = [pair for c in commands if isinstance(c, DropCheckpoints) for pair in c.dropped]
    assert dropped == [(3, 1)], "that of step 1 has the least held-out loss"


def test_missing_steps_do_not_count_as_skipped() -> None:
    core = make_training_core(max_skipped=20)
    loss_monitor.commit(core.state, record_of(1, skipped=True, loss=None))
    for step in range(2, 30):
        loss_monitor.commit(core.state, record_of(step, missing=True))
    loss_monitor.commit(core.state, record_of(30, skipped=True, loss=None))
    assert core.state.ending is None and core.state.losses.skipped_since == 30


def test_script_that_all_members_have_not_left_may_go_on() -> None:
    core = open_script(steps=10)
    commit(core, 1)
    deliver(core, Paused("w0", 1, 1, is_last=True), WorkerLost("w1", "killed"))
    assert isinstance(core.state.phase, Aborting) and core.state.job.steps == 10


def test_first_step_of_a_later_generation_may_compile_as_long() -> None:
    run = SteppedCore(2)
    policy = run.core.state.policy
    run.now += 90.0
    run.commit(1)
    assert hang_patience_s(run.core.state) == policy.hang_timeout_s
    run.deliver(WorkerLost("w1", "killed"), Quiesced("w0", 1, 1))
    run.workers = ["w0", "w2"]
    run.deliver(WorkerReady("w2", "node", 1))
    while not isinstance(run.core.state.phase, Running):
        run.form()
    assert hang_patience_s(run.core.state) == policy.first_step_timeout_s
    run.commit(2)
    assert hang_patience_s(run.core.state) == policy.hang_timeout_s


def test_evaluation_of_a_step_that_was_lost_is_repeated() -> None:
    run = SteppedCore(1)
    run.commit(1)
    run.deliver(Evaluated(1, 1, 0.5), WorkerLost("w0", "killed"), Evaluated(1, 2, 0.4))
    assert isinstance(run.core.state.phase, Waiting)
    assert run.core.state.evaluated_step == 1


def test_repeated_parts_of_an_older_checkpoint_open_no_upload() -> None:
    """Workers repeat their reports to a controller that has restarted."""
    run = SteppedCore(1, saved=(Saved(5, 1, "step-5-g1"),))
    run.core.state.steps.unheard = (1, 5)
    generation = run.core.state.generation
    run.deliver(PartWritten("w0", generation, 3, PartFile("part-w0", 1, 1, 0)))
    assert not run.core.state.checkpoints.uploads


def test_pause_that_ends_in_waiting_is_not_measured_as_one_of_growth() -> None:
    run = SteppedCore(1)
    run.commit(1)
    run.deliver(WorkerDraining("w0", "asked to"))
    assert isinstance(run.core.state.phase, Pausing)
    assert run.core.state.growth.paused_at is not None
    run.deliver(Paused("w0", 1, 1))
    assert isinstance(run.core.state.phase, Waiting)
    assert run.core.state.growth.paused_at is None


def test_checkpoint_of_a_step_that_survivors_did_not_begin_to_write_is_requested_again() -> None:
    """w2 has written its part and died; w0 still writes, and w1 unwound before it began."""
    run = SteppedCore(3, job=Job(8, steps=1000, checkpoint_every=3))
    for step in (1, 2, 3):
        run.commit(step)
    checkpoints, generation = run.core.state.checkpoints, run.core.state.generation
    assert [upload.step for upload in checkpoints.uploads.values()] == [3]
    run.deliver(PartWritten("w2", generation, 3, PartFile("part-w2", 1, 1)))
    run.deliver(WorkerLost("w2", "killed"), Quiesced("w0", generation, 3, saving_step=3))
    assert checkpoints.uploads
    run.deliver(Quiesced("w1", generation, 3))
    assert not run.core.state.checkpoints.uploads
    assert run.core.state.checkpoints.save_at == run.now


def test_checkpoint_that_all_survivors_have_begun_to_write_is_kept() -> None:
    run = SteppedCore(2, job=Job(8, steps=1000, checkpoint_every=1))
    run.commit(1)
    generation = run.core.state.generation
    run.deliver(PartWritten("w1", generation, 1, PartFile("part-w1", 1, 1)))
    run.deliver(WorkerLost("w1", "killed"), Quiesced("w0", generation, 1, saving_step=1))
    assert [upload.pending for upload in run.core.state.checkpoints.uploads.values()] == [{"w0"}]


def test_checkpoint_of_a_step_that_a_survivor_rolls_forward_to_is_requested_again() -> None:
    run = SteppedCore(3, job=Job(8, steps=1000, checkpoint_every=1))
    generation, vote = run.core.state.generation, Vote(1, 1.0, 1, 1.0, 3)
    run.commit(1)
    run.deliver(PartWritten("w2", generation, 1, PartFile("part-w2", 1, 1)))
    run.deliver(WorkerLost("w2", "killed"), Quiesced("w0", generation, 1, vote, saving_step=1))
    commands = run.deliver(Quiesced("w1", generation, 0, gradients_complete=True))
    assert any(isinstance(command, RollForward) for command in commands)
    run.deliver(RolledForward("w1", generation, record_of(1)))
    assert not run.core.state.checkpoints.uploads
    assert run.core.state.checkpoints.save_at == run.now
