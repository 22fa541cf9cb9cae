"""Nodes that announce their end: left at a boundary, ahead of it, or later; and those that stay."""

from __future__ import annotations

from typing import Any

from test_core import told
from users_policy import users_policy

from elastic.controller.core import Core
from elastic.geometry.target_layout import TargetLayout
from elastic.geometry.training_job import Job
from elastic.protocol.commands import (
    Abort,
    Command,
    Form,
    Pause,
    RequestCheckpoint,
    StartSnapshots,
    StartWorkers,
    StopWorker,
    Warned,
)
from elastic.protocol.events import (
    Event,
    GroupFormed,
    NodeAtRisk,
    NodeDraining,
    Paused,
    Quiesced,
    RunOpened,
    SnapshotServerReady,
    StateReady,
    StepCommitted,
    StoreReady,
    Woke,
    WorkerDraining,
    WorkerLost,
    WorkerReady,
)
from elastic.protocol.phases import Aborting, Forming, Pausing, Running, Waiting
from elastic.protocol.votes import StepRecord, Vote
from elastic.protocol.wire import decode, encode
from elastic.reshard.snapshot_placement import SnapshotServer

START = 20.0
STEP_S = 4.0


def commit(core: Core, step: int, now: float) -> list[Command]:
    generation, num_members = core.state.generation, len(core.state.live.members())
    record = StepRecord(now, step, generation, num_members, 1.0, 1, 0.1, 1.0, STEP_S, False)
    vote = Vote(step, 1.0, 1, 1.0, num_members, num_snapshots=num_members)
    return told(core, StepCommitted(generation, record, vote), now=now)


def form(core: Core, now: float) -> None:
    """All that take part form, move and train."""
    assert isinstance(core.state.phase, Forming)
    people, generation = core.state.phase.attempt.plan.participants, core.state.generation
    told(core, *(GroupFormed(worker, generation) for worker in people), now=now)
    told(core, *(StateReady(w, generation, 0, 0, 0.0, 1, 1, 1) for w in people), now=now)


def training(nodes: str, layout: str = "", least: int = 1, **policy: int) -> Core:
    """A worker a letter, on the node of that name; the first step has committed at START. A notice
    requests no checkpoint."""
    core, num_workers = Core(), len(nodes)
    rules = users_policy(least, num_workers, **{"checkpoint_auto": False, **policy})
    job = Job(12, steps=1000)
    told(
        core,
        RunOpened(1, rules, TargetLayout.parse(layout, num_workers), job),
        StoreReady("host", 1),
    )
    workers = (WorkerReady(f"w{i}", node, 1) for i, node in enumerate(nodes))
    told(core, *workers, now=START - STEP_S - 1.0)
    form(core, START - STEP_S)
    commit(core, 1, START)
    assert isinstance(core.state.phase, Running)
    return core


def drain(core: Core, node: str, in_s: float, now: float = START) -> list[Command]:
    return told(core, NodeDraining(node, now + in_s, "a notice"), now=now)


def quiesce(core: Core, *workers: str, step: int = 1, now: float = START) -> list[Command]:
    generation, vote = core.state.generation, core.state.steps.last_vote
    events: list[Event] = [Quiesced(w, generation, step, vote) for w in workers]
    return told(core, *events, now=now)


def of(kind: type, commands: list[Command]) -> list[Any]:
    return [command for command in commands if isinstance(command, kind)]


def nodes_of(protect: StartSnapshots) -> list[list[str]]:
    """Where each member's snapshots go."""
    return [
        [snapshot_server.node for snapshot_server in snapshot_servers]
        for snapshot_servers in protect.snapshot_servers
    ]


def test_a_node_is_left_at_the_next_boundary_if_one_comes_in_time() -> None:
    core = training("aabb")
    assert drain(core, "b", 30.0) == [Pause(1, ("w0", "w1", "w2", "w3"), "members drain")]
    commit(core, 2, START + STEP_S)
    commands = told(core, *(Paused(f"w{i}", 1, 2) for i in range(4)), now=START + STEP_S)
    [form_order] = of(Form, commands)
    assert form_order.assignment.members == ("w0", "w1")
    assert core.state.committed_step == 2


def test_a_node_that_is_gone_before_any_boundary_is_left_at_once() -> None:
    core = training("aabb")
    commands = drain(core, "b", 3.0)
    assert [c.worker for c in of(StopWorker, commands)] == ["w2", "w3"]
    assert [c.workers for c in of(Abort, commands)] == [("w0", "w1")]
    [form_order] = of(Form, quiesce(core, "w0", "w1"))
    assert form_order.plan.step == 1, "no committed step is redone"
    assert form_order.plan.participants == ("w0", "w1")


def test_a_boundary_that_is_near_is_waited_for() -> None:
    core = training("aabb")
    assert of(Pause, drain(core, "b", 3.0, now=START + 3.5))


def test_before_any_step_is_timed_a_boundary_is_hoped_for() -> None:
    core = training("aabb")
    core.state.steps.recent_step_s.clear()
    assert of(Pause, drain(core, "b", 3.0))


def test_who_alone_has_a_part_gives_it_while_it_lives() -> None:
    core = training("ab", layout="fsdp=2")
    commands = drain(core, "b", 3.0)
    assert not of(StopWorker, commands)
    assert [c.workers for c in of(Abort, commands)] == [("w0", "w1")]
    [form_order] = of(Form, quiesce(core, "w0", "w1"))
    assert form_order.assignment.members == ("w0",)
    assert form_order.plan.participants == ("w0", "w1")
    assert form_order.plan.step == 1
    form(core, START + 1.0)
    assert isinstance(core.state.phase, Running)
    assert core.next_deadline() is not None


def test_the_time_that_its_part_needs_counts() -> None:
    core = training("ab", layout="fsdp=2")
    core.state.forming.reshard_s = 5.0
    assert of(Abort, drain(core, "b", 8.0)), "at the boundary only 4 s would be left"
    core = training("ab", layout="fsdp=2")
    assert of(Pause, drain(core, "b", 8.0))


def test_a_boundary_that_does_not_come_is_not_waited_for() -> None:
    core = training("aabb")
    drain(core, "b", 10.0)
    assert isinstance(core.state.phase, Pausing)
    assert core.next_deadline() == START + 10.0
    commands = told(core, Woke(), now=START + 10.0)
    assert isinstance(core.state.phase, Aborting)
    assert [c.workers for c in of(Abort, commands)] == [("w0", "w1")]


def test_nodes_that_go_together_do_not_cover_for_one_another() -> None:
    """One of two replicas is let go where the other stays, neither where both will be gone."""
    core = training("abc", layout="dp=2")
    assert core.state.live.members() == ("w0", "w1")
    assert [c.worker for c in of(StopWorker, drain(core, "a", 3.0))] == ["w0"]
    core = training("abc", layout="dp=2")
    drain(core, "b", 30.0)
    told(core, NodeDraining("a", START + 30.0), now=START)
    commands = told(core, Woke(), now=START + 30.0)
    assert of(Abort, commands) and not of(StopWorker, commands)


def test_where_too_few_would_stay_the_run_trains_on_and_saves() -> None:
    core = training("ab", least=2)
    commands = drain(core, "b", 120.0)
    assert of(RequestCheckpoint, commands) and not of(Pause, commands)
    assert isinstance(core.state.phase, Running)
    commit(core, 2, START + 119.0)
    told(core, Woke(), now=START + 121.0)
    assert isinstance(core.state.phase, Running), "it may not end, after all"


def test_it_is_left_once_another_worker_has_come() -> None:
    core = training("ab", least=2)
    drain(core, "b", 120.0)
    assert of(Pause, told(core, WorkerReady("w2", "c", 1), now=START + 20.0))


def test_one_that_is_asked_to_go_by_name_goes_all_the_same() -> None:
    core = training("ab", least=2)
    drain(core, "b", 120.0)
    assert of(Pause, told(core, WorkerDraining("w1", "asked to"), now=START))


def test_a_joiner_on_such_a_node_is_not_kept() -> None:
    core = training("aab")
    told(core, WorkerLost("w2", "killed"), now=START)
    quiesce(core, "w0", "w1")
    form(core, START)
    commit(core, 2, START)
    drain(core, "b", 120.0)
    assert told(core, WorkerReady("w3", "b", 1), now=START) == [
        StopWorker("w3", "its node is draining"),
        StartWorkers(("w4",)),
    ]


def test_a_node_that_does_not_end_is_used_again() -> None:
    core = training("ab", least=2)
    drain(core, "b", 30.0)
    told(core, WorkerLost("w0", "killed"), now=START)
    quiesce(core, "w1")
    assert isinstance(core.state.phase, Waiting)
    assert core.state.membership.draining == {"w1"}
    told(core, WorkerReady("w2", "c", 1), now=START)
    assert isinstance(core.state.phase, Waiting)
    told(core, Woke(), now=START + 30.0 + core.state.policy.drain_grace_s)
    assert core.state.membership.node_drains == {}
    assert core.state.membership.draining == set()
    assert isinstance(core.state.phase, Forming)


def test_who_was_asked_to_go_does_not_come_back() -> None:
    core = training("aabb")
    drain(core, "b", 30.0)
    told(core, WorkerDraining("w3", "asked to"), now=START)
    told(core, Woke(), now=START + 90.0)
    assert core.state.membership.draining == {"w3"}


def test_a_notice_of_long_ago_means_nothing() -> None:
    core = training("aabb")
    assert told(core, NodeDraining("b", START - 60.0), now=START) == []
    assert core.state.membership.draining == set()


def test_a_node_that_may_be_taken_is_told_of_and_kept() -> None:
    core = training("aabb")
    [warned] = told(core, NodeAtRisk("b", "AWS rebalance recommendation"), now=START)
    assert isinstance(warned, Warned)
    assert warned.text == "node b may be reclaimed soon: AWS rebalance recommendation"
    assert core.state.membership.draining == set()


def test_snapshots_go_to_no_keeper_that_will_be_gone() -> None:
    """Too few would stay, so its worker trains on; but nothing is kept there any more."""
    core = training("abc", layout="fsdp=3", least=3, snapshot_every=1)
    snapshot_servers = [SnapshotServerReady(SnapshotServer(n, "", n, "host", 1)) for n in "abc"]
    [before] = of(StartSnapshots, told(core, *snapshot_servers, now=START))
    assert nodes_of(before) == [["a", "b"], ["b", "c"], ["c", "a"]]
    [after] = of(StartSnapshots, drain(core, "c", 120.0))
    assert nodes_of(after) == [["a", "b"], ["b", "a"], ["a"]]


def test_what_is_known_of_drains_outlives_the_controller() -> None:
    core = training("aabb")
    drain(core, "b", 30.0)
    again = decode(type(core.state), encode(core.state))
    assert again == core.state
    assert again.membership.node_drains["b"].draining_workers == {"w2", "w3"}
