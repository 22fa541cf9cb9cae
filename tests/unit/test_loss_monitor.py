"""Reactions of the core to losses that no scenario file contains."""

from __future__ import annotations

import pytest
from users_policy import users_policy

from elastic.controller.core import Core
from elastic.duties.rollback import void_after
from elastic.geometry.target_layout import TargetLayout
from elastic.geometry.training_job import Job
from elastic.protocol.commands import Command, Resume
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
from elastic.protocol.notes import RolledBack, Warned
from elastic.protocol.policy import Policy
from elastic.protocol.votes import StepRecord, Vote
from elastic.reshard.snapshot_placement import Placement


def make_training_core(**policy: float) -> Core:
    core = Core()
    open_run(core, users_policy(1, 1, **policy))  # type: ignore[arg-type]
    return core


def open_run(core: Core, policy: Policy, saved: tuple[Saved, ...] = ()) -> list[Command]:
    worker = f"w{core.state.membership.next_worker}"
    job = Job(8, steps=1000, checkpoint_every=0)
    commands = core.step(
        0.0, RunOpened(core.state.incarnation + 1, policy, TargetLayout(), job, saved)
    )
    commands += core.step(0.0, StoreReady("host", 1))
    commands += core.step(0.0, WorkerReady(worker, "node", 1))
    return commands + form(core)


def form(core: Core) -> list[Command]:
    [worker] = core.state.membership.warm
    commands = core.step(0.0, GroupFormed(worker, core.state.generation))
    return commands + core.step(0.0, StateReady(worker, core.state.generation, 0, 0, 0.0, 1, 1, 2))


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
        ([2.0, 9.0], False),  # too few losses for a median
        ([2.0, 9.0, 2.0, 2.0, 5.9], False),  # an earlier high loss does not move the median
        ([2.0, None, None, 2.0, 7.0], True),  # skipped steps have no loss
        ([-2.0, -2.0, -2.0, -1.0], False),  # a loss that is not positive has no factor
    ],
)
def test_loss_above_factor_times_median_is_a_spike(
    losses: list[float | None], is_spike: bool
) -> None:
    core = make_training_core(spike_factor=3.0, spike_window=4)
    commands = [command for loss in losses for command in commit(core, loss)]
    spikes = [c for c in commands if isinstance(c, Warned) and c.kind == "spike"]
    assert bool(spikes) == is_spike


def test_no_loss_is_a_spike_without_a_factor() -> None:
    core = make_training_core()
    assert not any(isinstance(c, Warned) for n in range(40) for c in commit(core, 9.0**n))
    assert core.state.losses.recent == []


def test_run_stopped_during_a_spike_is_not_rolled_back() -> None:
    core = make_training_core(spike_factor=3.0, spike_window=4)
    for loss in (2.0, 2.0, 9.0):
        commit(core, loss)
    assert core.state.rollbacks.request
    core.step(0.0, StopRequested("SIGTERM"))
    commands = pause(core)
    assert not any(isinstance(command, RolledBack) for command in commands)
    assert core.state.rollbacks.request is None and core.state.live.held


def test_rollback_is_made_after_a_restart_if_the_controller_died_before_it() -> None:
    core = make_training_core(spike_factor=3.0, spike_window=2)
    commit(core, 2.0)
    save(core)
    for loss in (2.0, 2.0, 9.0):
        commit(core, loss)
    assert core.state.rollbacks.request
    commands = open_run(core, core.state.policy, (Saved(1, 1, "step-1-g1"),))
    [rolled_back] = [command for command in commands if isinstance(command, RolledBack)]
    assert (rolled_back.step, rolled_back.skipped_batches) == (1, (1, 2, 3))
    [resume] = [command for command in commands if isinstance(command, Resume)]
    assert resume.skipped_batches == (1, 2, 3)


def test_batches_of_successive_spikes_are_skipped() -> None:
    """The batches of the second spike are counted without those of the first."""
    core = make_training_core(spike_factor=3.0, spike_window=2)
    for loss in (2.0, 2.0):
        commit(core, loss)
    save(core)
    for skipped_batches in ((2,), (2, 3)):
        commit(core, 9.0)
        pause(core)
        form(core)
        assert core.state.rollbacks.skipped_batches == skipped_batches
    assert (core.state.committed_step, core.state.rollbacks.number) == (2, 2)


def test_progress_after_a_rollback_resets_the_count_of_rollbacks() -> None:
    core = make_training_core(spike_factor=3.0, spike_window=2, max_rollbacks=1)
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


def test_reopening_forgets_losses_and_audits_of_undone_steps() -> None:
    """Losses, skipped steps and clean audits of later steps belong to another lineage."""
    core = make_training_core(spike_factor=3.0, spike_window=8, audit_every=1)
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


def test_rollback_forgets_losses_and_audits_of_undone_steps() -> None:
    core = make_training_core(spike_factor=3.0, spike_window=8, audit_every=1)
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


def test_count_of_skipped_steps_survives_a_restart() -> None:
    core = make_training_core(max_skipped=3)
    commit(core, 2.0)
    for _ in range(2):
        commit(core, None)
    save(core)
    open_run(core, core.state.policy, tuple(core.state.checkpoints.saved))
    assert core.state.ending is None
    commit(core, None)
    assert core.state.ending and "steps 2 to 4" in core.state.ending.reason


def test_void_checkpoints_stay_void_after_restarts() -> None:
    core = make_training_core()
    core.state.checkpoints.voided = (VoidedCheckpoints(4, 2),)
    for _ in range(2):
        open_run(core, core.state.policy)
        assert core.state.checkpoints.voided == (VoidedCheckpoints(4, 2),)


def test_restarted_run_rolls_back_at_most_to_its_start() -> None:
    core = make_training_core(audit_every=50, spike_window=2)
    for _ in range(60):
        commit(core, 2.0)
    save(core)
    open_run(core, core.state.policy, tuple(core.state.checkpoints.saved))
    for _ in range(40):
        commit(core, 2.0)
    split = (("w0",), ("w1",))
    core.step(0.0, Audited(core.state.generation, 100, 2, (split,)))
    assert core.state.rollbacks.request and core.state.rollbacks.request.limit == 60


def test_checkpoint_of_the_last_clean_audit_is_retained() -> None:
    core = make_training_core(audit_every=5, keep_last=1)
    state, saved_steps = core.state, []
    for step, clean in ((4, 3), (8, 5), (12, 10), (16, 15), (20, 20)):
        state.committed_step = step
        core.step(0.0, Checkpointed(step, state.generation, f"step-{step}"))
        state.audits.audited_step = clean
        core.step(0.0, Checkpointed(step, state.generation, f"step-{step}"))
        saved_steps.append([saved.step for saved in state.checkpoints.saved])
    assert saved_steps == [[4], [4, 8], [8, 12], [12, 16], [20]]


def test_snapshots_of_distrusted_steps_are_not_used() -> None:
    core = make_training_core()
    assert core.state.live.held
    state, assignment = core.state, core.state.live.held.assignment
    state.snapshots.sets = [SnapshotSet(assignment, newest) for newest in (2, 9, None)]
    state.snapshots.placement = Placement({"w0": ("node",)})
    void_after(state, 5)
    assert [snapshot_set.newest_step for snapshot_set in state.snapshots.sets] == [2, 5, 5]
    assert not state.snapshots.placement.copies
