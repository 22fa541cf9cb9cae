"""What the core makes of losses, where no scenario file tells of it."""

from __future__ import annotations

import pytest
from users_policy import users_policy

from elastic.controller.core import Core
from elastic.duties.rollback import distrust
from elastic.geometry.target_layout import TargetLayout
from elastic.geometry.training_job import Job
from elastic.protocol.commands import Command, Resume, RolledBack, Warned
from elastic.protocol.duty_records import SnapshotSet, VoidedCheckpoints
from elastic.protocol.events import (
    Audited,
    Checkpointed,
    GroupFormed,
    Paused,
    RunOpened,
    Saved,
    StateReady,
    StepCommitted,
    StopRequested,
    StoreReady,
    WorkerReady,
)
from elastic.protocol.policy import Policy
from elastic.protocol.votes import StepRecord, Vote
from elastic.reshard.snapshot_placement import Placement


def training(**policy: float) -> Core:
    core = Core()
    open_run(core, users_policy(1, 1, **policy))  # type: ignore[arg-type]
    return core


def open_run(core: Core, policy: Policy, saved: tuple[Saved, ...] = ()) -> list[Command]:
    worker = f"w{core.state.membership.next_worker}"
    job = Job(8, steps=1000, checkpoint_every=0)
    told = core.step(0.0, RunOpened(core.state.incarnation + 1, policy, TargetLayout(), job, saved))
    told += core.step(0.0, StoreReady("host", 1))
    told += core.step(0.0, WorkerReady(worker, "node", 1))
    return told + form(core)


def form(core: Core) -> list[Command]:
    [worker] = core.state.membership.warm
    told = core.step(0.0, GroupFormed(worker, core.state.generation))
    return told + core.step(0.0, StateReady(worker, core.state.generation, 0, 0, 0.0, 1, 1, 2))


def commit(core: Core, loss: float | None) -> list[Command]:
    step, generation = core.state.committed_step + 1, core.state.generation
    record = StepRecord(0.0, step, generation, 1, loss, 8, 0.1, 1.0, 0.5, loss is None)
    return core.step(0.0, StepCommitted(generation, record, Vote(step, 1.0, 8, 1.0, 1)))


def pause(core: Core) -> list[Command]:
    [worker] = core.state.live.members()
    return core.step(0.0, Paused(worker, core.state.generation, core.state.committed_step))


def save(core: Core) -> None:
    step, generation = core.state.committed_step, core.state.generation
    core.step(0.0, Checkpointed(step, generation, f"step-{step}-g{generation}"))


@pytest.mark.parametrize(
    ("losses", "is_spike"),
    [
        ([2.0, 2.0, 2.0, 6.1], True),
        ([2.0, 2.0, 2.0, 5.9], False),
        ([2.0, 9.0], False),  # too few to judge by
        ([2.0, 9.0, 2.0, 2.0, 5.9], False),  # one that was high before moves no median
        ([2.0, None, None, 2.0, 7.0], True),  # skipped steps have no loss
        ([-2.0, -2.0, -2.0, -1.0], False),  # nothing is known of a loss that is not positive
    ],
)
def test_what_is_a_spike(losses: list[float | None], is_spike: bool) -> None:
    core = training(spike_factor=3.0, spike_window=4)
    told = [command for loss in losses for command in commit(core, loss)]
    spikes = [c for c in told if isinstance(c, Warned) and c.kind == "spike"]
    assert bool(spikes) == is_spike


def test_without_a_factor_nothing_is_a_spike() -> None:
    core = training()
    assert not any(isinstance(c, Warned) for n in range(40) for c in commit(core, 9.0**n))
    assert core.state.losses.recent == []


def test_a_run_that_is_stopped_on_a_spike_keeps_what_it_has() -> None:
    core = training(spike_factor=3.0, spike_window=4)
    for loss in (2.0, 2.0, 9.0):
        commit(core, loss)
    assert core.state.rollbacks.request
    core.step(0.0, StopRequested("SIGTERM"))
    told = pause(core)
    assert not any(isinstance(command, RolledBack) for command in told)
    assert core.state.rollbacks.request is None and core.state.live.held


def test_a_controller_that_dies_before_the_rewind_does_it_when_begun_again() -> None:
    core = training(spike_factor=3.0, spike_window=2)
    commit(core, 2.0)
    save(core)
    for loss in (2.0, 2.0, 9.0):
        commit(core, loss)
    assert core.state.rollbacks.request
    told = open_run(core, core.state.policy, (Saved(1, 1, "step-1-g1"),))
    [rolled_back] = [command for command in told if isinstance(command, RolledBack)]
    assert (rolled_back.step, rolled_back.skipped_batches) == (1, (1, 2, 3))
    [resume] = [command for command in told if isinstance(command, Resume)]
    assert resume.skipped_batches == (1, 2, 3)


def test_batches_are_left_out_one_after_the_other() -> None:
    """The second spike's batches are counted without those of the first."""
    core = training(spike_factor=3.0, spike_window=2)
    for loss in (2.0, 2.0):
        commit(core, loss)
    save(core)
    for skipped_batches in ((2,), (2, 3)):
        commit(core, 9.0)
        pause(core)
        form(core)
        assert core.state.rollbacks.skipped_batches == skipped_batches
    assert (core.state.committed_step, core.state.rollbacks.number) == (2, 2)


def test_who_has_come_further_may_go_back_as_often_again() -> None:
    core = training(spike_factor=3.0, spike_window=2, max_rollbacks=1)
    for loss in (2.0, 2.0):
        commit(core, loss)
    for _ in range(3):
        save(core)
        commit(core, 9.0)
        pause(core)
        form(core)
        for _ in range(4):
            commit(core, 2.0)
    assert core.state.rollbacks.number == 1 and len(core.state.rollbacks.skipped_batches) == 3


def test_what_is_undone_is_forgotten() -> None:
    """Losses, skipped steps and clean audits of later steps are those of another history."""
    core = training(spike_factor=3.0, spike_window=8, audit_every=1)
    for loss in (2.0, 2.0, 2.0, 2.0):
        commit(core, loss)
    save(core)
    for loss in (2.5, None, None):
        commit(core, loss)
        core.step(0.0, Audited(core.state.generation, core.state.committed_step, 2))
    assert (core.state.losses.skipped_since, core.state.audits.audited_step) == (6, 7)
    saved = tuple(core.state.checkpoints.saved)
    assert open_run(core, core.state.policy, saved)
    state = core.state
    assert [step for step, _ in state.losses.recent] == [1, 2, 3, 4]
    assert (state.committed_step, state.losses.skipped_since, state.audits.audited_step) == (
        4,
        None,
        4,
    )


def test_going_back_by_itself_forgets_as_well() -> None:
    core = training(spike_factor=3.0, spike_window=8, audit_every=1)
    for loss in (2.0, 2.0, 2.0, 2.0):
        commit(core, loss)
    save(core)
    for loss in (2.0, None, 9.0):
        commit(core, loss)
        core.step(0.0, Audited(core.state.generation, core.state.committed_step, 2))
    assert core.state.audits.audited_step == 7
    pause(core)
    state = core.state
    assert [step for step, _ in state.losses.recent] == [1, 2, 3, 4]
    assert (state.committed_step, state.losses.skipped_since, state.audits.audited_step) == (
        4,
        None,
        4,
    )


def test_the_count_of_skipped_steps_outlives_the_controller() -> None:
    core = training(max_skipped=3)
    commit(core, 2.0)
    for _ in range(2):
        commit(core, None)
    save(core)
    open_run(core, core.state.policy, tuple(core.state.checkpoints.saved))
    assert core.state.ending is None
    commit(core, None)
    assert core.state.ending and "steps 2 to 4" in core.state.ending.reason


def test_what_is_void_stays_so_however_often_a_controller_begins() -> None:
    core = training()
    core.state.checkpoints.voided = (VoidedCheckpoints(4, 2),)
    for _ in range(2):
        open_run(core, core.state.policy)
        assert core.state.checkpoints.voided == (VoidedCheckpoints(4, 2),)


def test_a_run_that_is_begun_again_goes_back_to_where_it_began() -> None:
    core = training(audit_every=50, spike_window=2)
    for _ in range(60):
        commit(core, 2.0)
    save(core)
    open_run(core, core.state.policy, tuple(core.state.checkpoints.saved))
    for _ in range(40):
        commit(core, 2.0)
    split = (("w0",), ("w1",))
    core.step(0.0, Audited(core.state.generation, 100, 2, (split,)))
    assert core.state.rollbacks.request and core.state.rollbacks.request.limit == 60


def test_the_checkpoint_that_may_be_gone_back_to_is_kept() -> None:
    core = training(audit_every=5, keep_last=1)
    state, there = core.state, []
    for step, clean in ((4, 3), (8, 5), (12, 10), (16, 15), (20, 20)):
        state.committed_step = step
        core.step(0.0, Checkpointed(step, state.generation, f"step-{step}"))
        state.audits.audited_step = clean
        core.step(0.0, Checkpointed(step, state.generation, f"step-{step}"))
        there.append([saved.step for saved in state.checkpoints.saved])
    assert there == [[4], [4, 8], [8, 12], [12, 16], [20]]


def test_snapshots_of_what_is_distrusted_protect_nobody() -> None:
    core = training()
    assert core.state.live.held
    state, assignment = core.state, core.state.live.held.assignment
    state.snapshots.sets = [SnapshotSet(assignment, newest) for newest in (2, 9, None)]
    state.snapshots.placement = Placement({"w0": ("node",)})
    distrust(state, 5)
    assert [snapshot_set.newest_step for snapshot_set in state.snapshots.sets] == [2, 5, 5]
    assert not state.snapshots.placement.copies
