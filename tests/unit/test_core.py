"""Single decisions of the core that no scenario file tells of."""

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
    Warned,
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
from elastic.protocol.phases import Forming, Pausing, Running
from elastic.protocol.votes import StepRecord, Vote
from elastic.protocol.wire import command_line


def opened(min_workers: int = 2, max_workers: int = 2, **policy: float) -> Core:
    """A run whose store is up and whose workers are starting."""
    core = Core()
    rules = users_policy(min_workers, max_workers, **policy)  # type: ignore[arg-type]
    core.step(0.0, RunOpened(1, rules, TargetLayout(max_workers=max_workers), Job(8, steps=10)))
    core.step(0.0, StoreReady("host", 1))
    return core


def told(core: Core, *events: Event, now: float = 1.0) -> list[Command]:
    return [command for event in events for command in core.step(now, event)]


def ready(worker: str, digest: str = "same") -> WorkerReady:
    return WorkerReady(worker, "node", 1, digest=digest)


def test_opening_starts_the_store_and_all_workers() -> None:
    opening = RunOpened(1, users_policy(1, 2), TargetLayout(), Job(8, steps=10))
    commands = Core().step(0.0, opening)
    assert StartStore() in commands
    assert StartWorkers(("w0", "w1")) in commands


def test_begun_again_with_fewer_steps_than_are_saved_there_is_nothing_to_do() -> None:
    core = Core()
    core.state.committed_step = 25
    saved = Saved(20, 1, "step-20-g1")
    opening = RunOpened(2, users_policy(), TargetLayout(), Job(8, steps=15), (saved,))
    commands = core.step(0.0, opening)
    assert commands == [Stopped("completed", 20, "step 20 is saved: nothing to do")]


def test_a_stopped_run_says_nothing_more() -> None:
    core = opened()
    (stopped,) = told(core, StopRequested("SIGTERM"))
    assert stopped == Stopped("interrupted", 0, "SIGTERM")
    assert told(core, ready("w0"), ready("w1"), Woke()) == []
    assert core.next_deadline() is None


def test_a_worker_whose_loss_was_told_first_is_not_welcome() -> None:
    core = opened()
    told(core, WorkerLost("w0", "killed"), ready("w0"))
    assert core.state.membership.warm == set()
    assert "w0" not in core.state.membership.records


def test_a_worker_that_keeps_dying_is_started_ever_more_slowly_but_for_ever() -> None:
    core = opened(gang_timeout_s=inf)
    told(core, ready("w0"))
    now, pauses, worker = 1.0, [], "w1"
    for _ in range(1100):
        told(core, WorkerLost(worker, "no such file"), now=now)
        woken = core.next_deadline()
        assert woken is not None
        pauses.append(woken - now)
        now = woken
        (start,) = told(core, Woke(), now=now)
        assert isinstance(start, StartWorkers)
        (worker,) = start.workers
    assert pauses[:4] == [1.0, 2.0, 4.0, 8.0]
    assert max(pauses) == 60.0
    assert core.state.ending is None


def test_other_sources_are_turned_away() -> None:
    core = opened()
    commands = told(core, ready("w0"), ready("w1", digest="other"))
    assert commands[-2:-1] == [StopWorker("w1", commands[-2].cause)]  # type: ignore[attr-defined]
    assert isinstance(commands[-1], Stopped)
    assert commands[-1].outcome == "user_error"
    assert "w1 on node runs other source code" in commands[-1].reason


def test_the_drivers_sources_count_from_the_first_worker_on() -> None:
    core = Core()
    job = Job(steps=100, digest="driver")
    opening = RunOpened(1, users_policy(max_workers=2), TargetLayout(), job)
    told(core, opening, StoreReady("host", 1))
    commands = told(core, ready("w0", digest="other"))
    assert isinstance(commands[-1], Stopped)
    assert "w0 on node runs other source code than the driver" in commands[-1].reason


def test_other_sources_do_not_end_a_run_that_trains() -> None:
    core = opened(1, 2)
    told(core, ready("w0"), now=1.0)
    told(core, Woke(), now=100.0)
    assert isinstance(core.state.phase, Forming)
    (stop,) = told(core, ready("w1", digest="other"), now=100.0)
    assert isinstance(stop, StopWorker)
    assert core.state.ending is None


def test_a_broken_device_at_the_start_is_that_machines_fault() -> None:
    core = opened()
    broken = WorkerRaised("w0", 0, "device", "CUDA error: no such device")
    assert told(core, broken) == [StopWorker("w0", broken.message)]
    assert core.state.ending is None


def test_a_machine_that_lacks_something_does_not_end_a_run_that_others_can_do() -> None:
    """All workers of one machine say so at once, before those of others are warm."""
    core = opened(1, 8)
    for number in range(1, 8):
        unfit = WorkerRaised(f"w{number}", 0, "machine", "node n: no way to the data")
        warned, stop, *_ = told(core, unfit)
        assert isinstance(warned, Warned) and warned.kind == "machine"
        assert stop == StopWorker(unfit.worker, unfit.message)
    assert core.state.ending is None
    told(core, ready("w0"), now=1.0)
    told(core, Woke(), now=100.0)
    assert isinstance(core.state.phase, Forming)


def test_a_member_whose_machine_lost_the_way_to_the_data_is_replaced() -> None:
    core = opened(1, 2)
    told(core, ready("w0"), ready("w1"), now=1.0)
    assert isinstance(core.state.phase, Forming)
    generation = core.state.generation
    unfit = WorkerRaised("w1", generation, "machine", "node n: no way to the data")
    commands = told(core, unfit, now=2.0)
    assert commands[0] == StopWorker("w1", unfit.message)
    assert isinstance(commands[1], Abort)
    assert core.state.ending is None


def test_an_exception_of_one_who_is_gone_means_nothing() -> None:
    core = opened()
    told(core, WorkerLost("w0", "killed"))
    assert told(core, WorkerRaised("w0", 0, "program", "late")) == []
    assert core.state.ending is None


def test_one_who_leaves_while_it_starts_is_no_failed_start() -> None:
    core = opened()
    assert told(core, WorkerDraining("w0", "asked to")) == [
        StopWorker("w0", "it was drained"),
        StartWorkers(("w2",)),
    ]
    told(core, WorkerLost("w0", "stopped"))
    assert core.state.membership.num_start_failures == 0


def test_a_draining_node_takes_only_its_own_workers() -> None:
    core = opened(1, 3)
    told(core, ready("w0"), WorkerReady("w1", "spot", 2, digest="same"))
    told(core, NodeDraining("spot", 100.0))
    assert core.state.membership.draining == {"w1"}


def formed(core: Core) -> Form:
    (form,) = [command for command in told(core, Woke(), now=99.0) if isinstance(command, Form)]
    finish_forming(core)
    return form


def finish_forming(core: Core) -> None:
    phase = core.state.phase
    assert isinstance(phase, Forming)
    people, generation = phase.attempt.plan.participants, core.state.generation
    told(core, *(GroupFormed(worker, generation) for worker in people), now=99.0)
    told(core, *(StateReady(w, generation, 0, 0, 0.0, 1, 1, 1) for w in people), now=99.0)
    assert isinstance(core.state.phase, Running)


def opened_with(target_layout: str, job: Job, num_workers: int) -> Core:
    core = Core()
    opening = RunOpened(
        1, users_policy(1, num_workers), TargetLayout.parse(target_layout, num_workers), job
    )
    told(core, opening, StoreReady("host", 1))
    return core


def test_the_order_to_form_tells_why_this_layout_and_why_no_other() -> None:
    core = opened_with("tp=2,dp=2", Job(8, steps=10), 4)
    told(core, ready("w0"), ready("w1"), ready("w2"))
    form = formed(core)
    assert str(form.assignment.layout) == "tp=2"
    assert "dp=2,tp=2 needs 4 workers, only 3 available" in form.reason
    assert form.refusals[0] == "dp=2,tp=2 needs 4 workers, only 3 available"
    line = command_line(99.0, form, core.state)
    assert (line["reason"], line["refusals"]) == (form.reason, list(form.refusals))


def test_the_wish_comes_back_even_with_no_more_members_than_before() -> None:
    """A spare with little memory keeps `cp` away; when it is replaced, `cp` comes back."""
    job = Job(4, state_bytes=120, margin=1.0, steps=10)
    core = opened_with("cp=2,fsdp=2", job, 5)
    told(core, *(with_memory(f"w{i}", 60) for i in range(4)))
    told(core, with_memory("w4", 40), now=98.0)
    assert str(core.state.phase.attempt.assignment.layout) == "fsdp=4"  # type: ignore[union-attr]
    finish_forming(core)
    commit(core, 1)
    told(core, WorkerLost("w4", "killed"), now=99.0)
    assert isinstance(core.state.phase, Running)
    told(core, with_memory("w5", 60), now=99.0)
    assert isinstance(core.state.phase, Pausing)
    told(core, *(Paused(f"w{i}", 1, 1) for i in range(4)), now=99.0)
    assert str(core.state.phase.attempt.assignment.layout) == "fsdp=2,cp=2"  # type: ignore[union-attr]


def with_memory(worker: str, memory_bytes: int) -> WorkerReady:
    return WorkerReady(worker, "node", 1, memory_bytes=memory_bytes)


def commit(core: Core, step: int) -> None:
    record = StepRecord(99.0, step, core.state.generation, 4, 1.0, 1, 0.1, 1.0, 0.5, False)
    told(core, StepCommitted(core.state.generation, record, Vote(step, 1.0, 1, 1.0, 4)), now=99.0)
