"""Single decisions of the core that no scenario file contains."""

from __future__ import annotations

from math import inf

from users_policy import users_policy

from elastic.controller.core import Core
from elastic.geometry.target_layout import TargetLayout
from elastic.geometry.training_job import Job
from elastic.protocol.commands import (
    Abort,
    Command,
    Form,
    StartStore,
    StartWorkers,
    Stopped,
    StopWorker,
)
from elastic.protocol.events import (
    Event,
    GroupFormed,
    NodeDraining,
    Paused,
    RunOpened,
    Saved,
    StateReady,
    StepCommitted,
    StopRequested,
    StoreReady,
    Woke,
    WorkerDraining,
    WorkerLost,
    WorkerRaised,
    WorkerReady,
)
from elastic.protocol.notes import Warned
from elastic.protocol.phases import Ending, Forming, Pausing, Running
from elastic.protocol.votes import StepRecord, Vote
from elastic.protocol.wire import command_line


def open_run(min_workers: int = 2, max_workers: int = 2, **policy: float) -> Core:
    """A core whose store is ready and whose workers start."""
    core = Core()
    run_policy = users_policy(min_workers, max_workers, **policy)  # type: ignore[arg-type]
    core.step(
        0.0, RunOpened(1, run_policy, TargetLayout(max_workers=max_workers), Job(8, steps=10))
    )
    core.step(0.0, StoreReady("host", 1))
    return core


def deliver(core: Core, *events: Event, now: float = 1.0) -> list[Command]:
    return [command for event in events for command in core.step(now, event)]


def ready_event(worker: str, digest: str = "same") -> WorkerReady:
    return WorkerReady(worker, "node", 1, digest=digest)


def test_opening_starts_the_store_and_all_workers() -> None:
    opening = RunOpened(1, users_policy(1, 2), TargetLayout(), Job(8, steps=10))
    commands = Core().step(0.0, opening)
    assert StartStore() in commands
    assert StartWorkers(("w0", "w1")) in commands


def test_run_opened_with_fewer_steps_than_saved_completes_at_once() -> None:
    core = Core()
    core.state.committed_step = 25
    saved = Saved(20, 1, "step-20-g1")
    opening = RunOpened(2, users_policy(), TargetLayout(), Job(8, steps=15), (saved,))
    commands = core.step(0.0, opening)
    assert commands == [Stopped("completed", 20, "step 20 is saved: nothing to do")]


def test_stopped_run_issues_no_commands_and_has_no_deadline() -> None:
    core = open_run()
    (stopped,) = deliver(core, StopRequested("SIGTERM"))
    assert stopped == Stopped("interrupted", 0, "SIGTERM")
    assert deliver(core, ready_event("w0"), ready_event("w1"), Woke()) == []
    assert core.next_deadline() is None


def test_worker_whose_loss_arrives_first_does_not_join() -> None:
    core = open_run()
    deliver(core, WorkerLost("w0", "killed"), ready_event("w0"))
    assert core.state.membership.warm == set()
    assert "w0" not in core.state.membership.records


def test_restart_delay_of_a_dying_worker_grows_to_60_s_without_a_limit() -> None:
    core = open_run(gang_timeout_s=inf)
    deliver(core, ready_event("w0"))
    now, pauses, worker = 1.0, [], "w1"
    for _ in range(1100):
        deliver(core, WorkerLost(worker, "no such file"), now=now)
        woken = core.next_deadline()
        assert woken is not None
        pauses.append(woken - now)
        now = woken
        (start,) = deliver(core, Woke(), now=now)
        assert isinstance(start, StartWorkers)
        (worker,) = start.workers
    assert pauses[:4] == [1.0, 2.0, 4.0, 8.0]
    assert max(pauses) == 60.0
    assert core.state.ending is None


def test_worker_with_other_sources_at_the_start_ends_the_run_as_user_error() -> None:
    core = open_run()
    commands = deliver(core, ready_event("w0"), ready_event("w1", digest="other"))
    assert commands[-2:-1] == [StopWorker("w1", commands[-2].cause)]  # type: ignore[attr-defined]
    assert isinstance(commands[-1], Stopped)
    assert commands[-1].outcome == "user_error"
    assert "w1 on node runs other source code" in commands[-1].reason


def test_first_worker_must_have_the_sources_of_the_driver() -> None:
    core = Core()
    job = Job(steps=100, digest="driver")
    opening = RunOpened(1, users_policy(max_workers=2), TargetLayout(), job)
    deliver(core, opening, StoreReady("host", 1))
    commands = deliver(core, ready_event("w0", digest="other"))
    assert isinstance(commands[-1], Stopped)
    assert "w0 on node runs other source code than the driver" in commands[-1].reason


def test_worker_with_other_sources_is_stopped_while_the_run_goes_on() -> None:
    core = open_run(1, 2)
    deliver(core, ready_event("w0"), now=1.0)
    deliver(core, Woke(), now=100.0)
    assert isinstance(core.state.phase, Forming)
    (stop,) = deliver(core, ready_event("w1", digest="other"), now=100.0)
    assert isinstance(stop, StopWorker)
    assert core.state.ending is None


def test_broken_device_at_the_start_stops_only_that_worker() -> None:
    core = open_run()
    broken = WorkerRaised("w0", 0, "device", "CUDA error: no such device")
    assert deliver(core, broken) == [StopWorker("w0", broken.message)]
    assert core.state.ending is None


def test_mistake_of_the_program_at_the_start_ends_the_run_as_a_user_error() -> None:
    core = open_run()
    mistake = WorkerRaised("w0", 0, "mistake", "train.py, line 3: no step")
    assert deliver(core, mistake)[0] == StopWorker("w0", mistake.message)
    assert core.state.ending == Ending("user_error", mistake.message)


def test_unfit_node_does_not_end_a_run_that_other_nodes_can_do() -> None:
    """All workers of one node report it at once, before those of other nodes are warm."""
    core = open_run(1, 8)
    for number in range(1, 8):
        unfit = WorkerRaised(f"w{number}", 0, "machine", "node n: no way to the data")
        warned, stop, *_ = deliver(core, unfit)
        assert isinstance(warned, Warned) and warned.kind == "machine"
        assert stop == StopWorker(unfit.worker, unfit.message)
    assert core.state.ending is None
    deliver(core, ready_event("w0"), now=1.0)
    deliver(core, Woke(), now=100.0)
    assert isinstance(core.state.phase, Forming)


def test_member_whose_node_cannot_reach_the_data_is_replaced() -> None:
    core = open_run(1, 2)
    deliver(core, ready_event("w0"), ready_event("w1"), now=1.0)
    assert isinstance(core.state.phase, Forming)
    generation = core.state.generation
    unfit = WorkerRaised("w1", generation, "machine", "node n: no way to the data")
    commands = deliver(core, unfit, now=2.0)
    assert commands[0] == StopWorker("w1", unfit.message)
    assert isinstance(commands[1], Abort)
    assert core.state.ending is None


def test_exception_of_a_lost_worker_is_ignored() -> None:
    core = open_run()
    deliver(core, WorkerLost("w0", "killed"))
    assert deliver(core, WorkerRaised("w0", 0, "program", "late")) == []
    assert core.state.ending is None


def test_worker_drained_during_its_start_is_no_failed_start() -> None:
    core = open_run()
    assert deliver(core, WorkerDraining("w0", "requested")) == [
        StopWorker("w0", "it was drained"),
        StartWorkers(("w2",)),
    ]
    deliver(core, WorkerLost("w0", "stopped"))
    assert core.state.membership.num_start_failures == 0


def test_draining_node_drains_only_its_own_workers() -> None:
    core = open_run(1, 3)
    deliver(core, ready_event("w0"), WorkerReady("w1", "spot", 2, digest="same"))
    deliver(core, NodeDraining("spot", 100.0))
    assert core.state.membership.draining == {"w1"}


def form_group(core: Core) -> Form:
    (form,) = [command for command in deliver(core, Woke(), now=99.0) if isinstance(command, Form)]
    finish_forming(core)
    return form


def finish_forming(core: Core) -> None:
    phase = core.state.phase
    assert isinstance(phase, Forming)
    participants, generation = phase.attempt.plan.participants, core.state.generation
    deliver(core, *(GroupFormed(worker, generation) for worker in participants), now=99.0)
    deliver(core, *(StateReady(w, generation, 0, 0, 0.0, 1, 1, 1) for w in participants), now=99.0)
    assert isinstance(core.state.phase, Running)


def open_with_layout(target_layout: str, job: Job, num_workers: int) -> Core:
    core = Core()
    opening = RunOpened(
        1, users_policy(1, num_workers), TargetLayout.parse(target_layout, num_workers), job
    )
    deliver(core, opening, StoreReady("host", 1))
    return core


def test_form_command_contains_the_reason_for_its_layout_and_the_refusals() -> None:
    core = open_with_layout("tp=2,dp=2", Job(8, steps=10), 4)
    deliver(core, ready_event("w0"), ready_event("w1"), ready_event("w2"))
    form = form_group(core)
    assert str(form.assignment.layout) == "tp=2"
    assert "dp=2,tp=2 needs 4 workers, only 3 available" in form.reason
    assert form.refusals[0] == "dp=2,tp=2 needs 4 workers, only 3 available"
    line = command_line(99.0, form, core.state)
    assert (line["reason"], line["refusals"]) == (form.reason, list(form.refusals))


def test_target_layout_returns_when_a_standby_worker_with_more_memory_comes() -> None:
    """`cp` does not fit the memory of one standby worker; once that is replaced, it does."""
    job = Job(4, state_bytes=120, margin=1.0, steps=10)
    core = open_with_layout("cp=2,fsdp=2", job, 5)
    deliver(core, *(ready_with_memory(f"w{i}", 60) for i in range(4)))
    deliver(core, ready_with_memory("w4", 40), now=98.0)
    assert str(core.state.phase.attempt.assignment.layout) == "fsdp=4"  # type: ignore[union-attr]
    finish_forming(core)
    commit(core, 1)
    deliver(core, WorkerLost("w4", "killed"), now=99.0)
    assert isinstance(core.state.phase, Running)
    deliver(core, ready_with_memory("w5", 60), now=99.0)
    assert isinstance(core.state.phase, Pausing)
    deliver(core, *(Paused(f"w{i}", 1, 1) for i in range(4)), now=99.0)
    assert str(core.state.phase.attempt.assignment.layout) == "fsdp=2,cp=2"  # type: ignore[union-attr]


def ready_with_memory(worker: str, memory_bytes: int) -> WorkerReady:
    return WorkerReady(worker, "node", 1, memory_bytes=memory_bytes)


def commit(core: Core, step: int) -> None:
    record = StepRecord(99.0, step, core.state.generation, 4, 1.0, 1, 0.1, 1.0, 0.5, False)
    deliver(
        core, StepCommitted(core.state.generation, record, Vote(step, 1.0, 1, 1.0, 4)), now=99.0
    )
