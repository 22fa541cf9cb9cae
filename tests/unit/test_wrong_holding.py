"""A worker refuses to serve state of another step than the plan's; it checks its own bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
from users_policy import users_options, users_policy

from actors.runtime.compute_time import compute_times
from actors.runtime.interruption import Interruption
from actors.runtime.program import Waits
from actors.storage.errors import StepMismatch
from actors.worker.error_kinds import kind_of
from actors.worker.holding import WorkerHolding
from actors.worker.step_protocol import Stepper
from actors.worker.step_timer import StepTimer
from actors.worker.trainer import Trainer
from elastic.controller.core import Core
from elastic.geometry.assignment import Assignment
from elastic.geometry.layout import Layout
from elastic.geometry.target_layout import TargetLayout
from elastic.geometry.training_job import Job
from elastic.protocol.commands import (
    Abort,
    Command,
    Form,
    RollForward,
    SaveCheckpoint,
    Stopped,
    StopWorker,
)
from elastic.protocol.events import (
    Event,
    GroupFormed,
    Paused,
    Quiesced,
    RunOpened,
    StateReady,
    StepCommitted,
    StopRequested,
    StoreReady,
    WorkerLost,
    WorkerRaised,
    WorkerReady,
)
from elastic.protocol.phases import Saving
from elastic.protocol.votes import StepRecord, Vote
from elastic.reshard.reshard_plan import ReshardPlan
from pipelines.run.program import TrainingProgram
from pipelines.run.recipes import tiny

OLD = Assignment(1, Layout(), ("w0",))
NEW = Assignment(2, Layout(), ("w0",))


@pytest.fixture
def trainer(tmp_path: Path) -> Trainer:
    """A worker at step 110 that holds its shard under generation 1."""
    settings = tiny().model_dump(mode="json") | {"data": {"source": "random", "seq_len": 16}}
    program = TrainingProgram(settings=settings, data_folder=None, device="cpu")
    options = users_options(str(tmp_path))
    trainer = Trainer("w0", "n0", program, options, lambda event: None, Interruption())
    trainer.holdings = {1: WorkerHolding(OLD, {})}
    trainer.held_step = 110
    return trainer


@pytest.mark.parametrize(
    ("step", "old"),
    [(10, OLD), (111, OLD), (110, Assignment(3, Layout(), ("w0",)))],
    ids=["an older step", "a newer step", "another assignment"],
)
def test_worker_refuses_a_plan_with_another_step_or_assignment(
    trainer: Trainer, step: int, old: Assignment
) -> None:
    plan = ReshardPlan(0, step, old, NEW, ("w0",))
    with pytest.raises(
        StepMismatch, match=f"step {step} under generation .* at step 110"
    ) as refusal:
        trainer.form(Form(2, NEW, plan, "127.0.0.1", 1))
    assert kind_of(refusal.value) == "holding"
    assert trainer.formation is None, "the worker refuses before it connects to others"


@pytest.mark.parametrize(("step", "generation"), [(109, 1), (111, 1), (110, 3)])
def test_worker_writes_no_checkpoint_of_another_step_than_its_own(
    trainer: Trainer, step: int, generation: int
) -> None:
    with pytest.raises(StepMismatch, match=f"step {step} under generation {generation}"):
        trainer.save(SaveCheckpoint(4, ("w0",), step, generation))
    assert not trainer.writer.is_busy


@pytest.mark.parametrize("step", [109, 110, 112])
def test_worker_applies_only_the_vote_of_its_next_step(trainer: Trainer, step: int) -> None:
    """It refuses a vote that it has applied and one that would skip a step (invariant 8)."""
    trainer.stepper = Stepper(
        None,  # type: ignore[arg-type]
        None,  # type: ignore[arg-type]
        110,
        trainer.interruption,
        trainer.faults,
        trainer.snapshots,
        trainer.writer,
        compute_times(0, trainer.program.device),
        trainer.records,
        StepTimer(trainer.program.device, Waits),
    )
    with pytest.raises(StepMismatch, match=f"step {step}, but this worker is at step 110"):
        trainer.roll_forward(RollForward(1, ("w0",), Vote(step, 1.0, 1, 1.0, 1)))
    assert trainer.stepper.committed_step == 110 and not trainer.stepper.torn
    with pytest.raises(StepMismatch, match="step 111 under"):
        trainer.save(SaveCheckpoint(4, ("w0",), 111, 1))


def make_running_core(num_workers: int, step: int) -> Core:
    """A run of `num_workers` replicas that has committed `step` under generation 1."""
    core = Core()
    workers = [f"w{number}" for number in range(num_workers)]
    policy = users_policy(1, num_workers, gang_timeout_s=0.0, growth_wait_s=0.0)
    target_layout, job = TargetLayout.parse(f"dp={num_workers}", num_workers), Job(8, steps=1000)
    deliver(core, RunOpened(1, policy, target_layout, job), StoreReady("host", 1))
    deliver(core, *(WorkerReady(worker, "node", 1) for worker in workers))
    deliver(core, *(GroupFormed(worker, 1) for worker in workers))
    deliver(core, *(StateReady(worker, 1, 0, 0, 0.0, 1, 1, 2) for worker in workers))
    for number in range(1, step + 1):
        record = StepRecord(0.0, number, 1, num_workers, 1.0, 1, 0.1, 1.0, 0.1, skipped=False)
        deliver(core, StepCommitted(1, record, Vote(number, 1.0, 1, 1.0, num_workers)))
    assert core.state.committed_step == step
    return core


def deliver(core: Core, *events: Event) -> list[Command]:
    return [command for event in events for command in core.step(1.0, event)]


def test_last_checkpoint_is_written_by_the_holders_of_its_step() -> None:
    core = make_running_core(2, 5)
    deliver(core, StopRequested("enough"), Paused("w0", 1, 5))
    assert deliver(core, Paused("w1", 1, 5)) == [SaveCheckpoint(2, ("w0", "w1"), 5, 1)]
    wrong = WorkerRaised("w0", 2, "holding", "it is at step 4")
    saves = [command for command in deliver(core, wrong) if isinstance(command, SaveCheckpoint)]
    assert saves == [SaveCheckpoint(3, ("w1",), 5, 1)]
    assert isinstance(core.state.phase, Saving)
    [stopped] = deliver(core, WorkerRaised("w1", 3, "holding", "it is at step 4"))
    assert isinstance(stopped, Stopped) and "do not hold the whole state" in stopped.reason


def test_worker_that_cannot_roll_forward_is_no_holder() -> None:
    """It goes on without state and receives the decided step from another worker."""
    core, vote = make_running_core(3, 5), Vote(6, 1.0, 1, 1.0, 3)
    [abort] = [
        command
        for command in deliver(core, WorkerLost("w2", "killed"))
        if isinstance(command, Abort)
    ]
    record = StepRecord(0.0, 6, 1, 3, 1.0, 1, 0.1, 1.0, 0.1, skipped=False)
    deliver(core, Quiesced("w0", abort.generation, 6, vote, records=(record,)))
    roll_forward = deliver(core, Quiesced("w1", abort.generation, 5, None, gradients_complete=True))
    assert RollForward(1, ("w1",), vote) in roll_forward
    commands = deliver(core, WorkerRaised("w1", 1, "holding", "it is at step 4"))
    [form] = [command for command in commands if isinstance(command, Form)]
    assert (form.plan.step, form.plan.holders) == (6, ("w0",))
    assert set(form.assignment.members) == {"w0", "w1"}
    assert not any(isinstance(command, StopWorker) for command in commands)
