"""Notices for nodes: when the run drains a node, and when it goes on using it."""

from __future__ import annotations

from typing import Any

from test_core import deliver
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
)
from elastic.protocol.events import (
    Event,
    GroupFormed,
    NodeAtRisk,
    NodeDraining,
    Paused,
    Quiesced,
    RunOpened,
    StateReady,
    StepCommitted,
    StoreReady,
    Woke,
    WorkerDraining,
    WorkerLost,
    WorkerReady,
)
from elastic.protocol.notes import Warned
from elastic.protocol.phases import Aborting, Forming, Pausing, Running, Waiting
from elastic.protocol.snapshot_events import SnapshotServerReady
from elastic.protocol.votes import StepRecord, Vote
from elastic.protocol.wire import decode, encode
from elastic.reshard.snapshot_placement import SnapshotServer

START = 20.0
STEP_S = 4.0


def commit(core: Core, step: int, now: float) -> list[Command]:
    generation, num_members = core.state.generation, len(core.state.live.members())
    record = StepRecord(now, step, generation, num_members, 1.0, 1, 0.1, 1.0, STEP_S, False)
    vote = Vote(step, 1.0, 1, 1.0, num_members, num_snapshots=num_members)
    return deliver(core, StepCommitted(generation, record, vote), now=now)


def form_group(core: Core, now: float) -> None:
    """Let all participants form their groups and receive their state."""
    assert isinstance(core.state.phase, Forming)
    participants, generation = core.state.phase.attempt.plan.participants, core.state.generation
    deliver(core, *(GroupFormed(worker, generation) for worker in participants), now=now)
    deliver(core, *(StateReady(w, generation, 0, 0, 0.0, 1, 1, 1) for w in participants), now=now)


def make_training_core(
    nodes: str, layout: str = "", min_workers: int = 1, batch: int = 12, **policy: int
) -> Core:
    """One worker per letter, on the node of that name; step 1 has committed at START. A notice
    requests no checkpoint."""
    core, num_workers = Core(), len(nodes)
    run_policy = users_policy(min_workers, num_workers, **{"checkpoint_auto": False, **policy})
    job = Job(batch, steps=1000)
    deliver(
        core,
        RunOpened(1, run_policy, TargetLayout.parse(layout, num_workers), job),
        StoreReady("host", 1),
    )
    workers = (WorkerReady(f"w{i}", node, 1) for i, node in enumerate(nodes))
    deliver(core, *workers, now=START - STEP_S - 1.0)
    form_group(core, START - STEP_S)
    commit(core, 1, START)
    assert isinstance(core.state.phase, Running)
    return core


def drain_node(core: Core, node: str, in_s: float, now: float = START) -> list[Command]:
    return deliver(core, NodeDraining(node, now + in_s, "a notice"), now=now)


def quiesce(core: Core, *workers: str, step: int = 1, now: float = START) -> list[Command]:
    generation, vote = core.state.generation, core.state.steps.last_vote
    events: list[Event] = [Quiesced(w, generation, step, vote) for w in workers]
    return deliver(core, *events, now=now)


def select(kind: type, commands: list[Command]) -> list[Any]:
    return [command for command in commands if isinstance(command, kind)]


def snapshot_nodes(command: StartSnapshots) -> list[list[str]]:
    """The nodes that hold the snapshots of each member."""
    return [
        [snapshot_server.node for snapshot_server in snapshot_servers]
        for snapshot_servers in command.snapshot_servers
    ]


def test_node_drains_at_the_next_step_boundary_if_it_comes_in_time() -> None:
    core = make_training_core("aabb")
    assert drain_node(core, "b", 30.0) == [Pause(1, ("w0", "w1", "w2", "w3"), "members drain")]
    commit(core, 2, START + STEP_S)
    commands = deliver(core, *(Paused(f"w{i}", 1, 2) for i in range(4)), now=START + STEP_S)
    [form_order] = select(Form, commands)
    assert form_order.assignment.members == ("w0", "w1")
    assert core.state.committed_step == 2


def test_node_that_ends_before_a_step_boundary_drains_at_once() -> None:
    core = make_training_core("aabb")
    commands = drain_node(core, "b", 3.0)
    assert [c.worker for c in select(StopWorker, commands)] == ["w2", "w3"]
    assert [c.workers for c in select(Abort, commands)] == [("w0", "w1")]
    [form_order] = select(Form, quiesce(core, "w0", "w1"))
    assert form_order.plan.step == 1, "no committed step is redone"
    assert form_order.plan.participants == ("w0", "w1")


def test_drain_waits_for_a_step_boundary_that_is_near() -> None:
    core = make_training_core("aabb")
    assert select(Pause, drain_node(core, "b", 3.0, now=START + 3.5))


def test_drain_waits_for_a_step_boundary_if_no_step_was_timed() -> None:
    core = make_training_core("aabb")
    core.state.steps.measured.recent_s.clear()
    assert select(Pause, drain_node(core, "b", 3.0))


def test_draining_worker_with_the_only_copy_of_a_shard_sends_it() -> None:
    core = make_training_core("ab", layout="fsdp=2")
    commands = drain_node(core, "b", 3.0)
    assert not select(StopWorker, commands)
    assert [c.workers for c in select(Abort, commands)] == [("w0", "w1")]
    [form_order] = select(Form, quiesce(core, "w0", "w1"))
    assert form_order.assignment.members == ("w0",)
    assert form_order.plan.participants == ("w0", "w1")
    assert form_order.plan.step == 1
    form_group(core, START + 1.0)
    assert isinstance(core.state.phase, Running)
    assert core.next_deadline() is not None


def test_drain_leaves_time_to_send_the_only_copy_of_a_shard() -> None:
    core = make_training_core("ab", layout="fsdp=2")
    core.state.forming.reshard_s = 5.0
    assert select(Abort, drain_node(core, "b", 8.0)), "only 4 s would remain at the step boundary"
    core = make_training_core("ab", layout="fsdp=2")
    assert select(Pause, drain_node(core, "b", 8.0))


def test_drain_aborts_if_the_step_boundary_does_not_come_in_time() -> None:
    core = make_training_core("aabb")
    drain_node(core, "b", 10.0)
    assert isinstance(core.state.phase, Pausing)
    assert core.next_deadline() == START + 10.0
    commands = deliver(core, Woke(), now=START + 10.0)
    assert isinstance(core.state.phase, Aborting)
    assert [c.workers for c in select(Abort, commands)] == [("w0", "w1")]


def test_nodes_that_drain_together_do_not_count_as_replicas_of_each_other() -> None:
    """One of two replicas is released if the other stays; neither is if both nodes end."""
    core = make_training_core("abc", layout="dp=2")
    assert core.state.live.members() == ("w0", "w1")
    assert [c.worker for c in select(StopWorker, drain_node(core, "a", 3.0))] == ["w0"]
    core = make_training_core("abc", layout="dp=2")
    drain_node(core, "b", 30.0)
    deliver(core, NodeDraining("a", START + 30.0), now=START)
    commands = deliver(core, Woke(), now=START + 30.0)
    assert select(Abort, commands) and not select(StopWorker, commands)


def test_run_that_would_fall_below_its_minimum_saves_and_trains_on() -> None:
    core = make_training_core("ab", min_workers=2)
    commands = drain_node(core, "b", 120.0)
    assert select(RequestCheckpoint, commands) and not select(Pause, commands)
    assert isinstance(core.state.phase, Running)
    commit(core, 2, START + 119.0)
    deliver(core, Woke(), now=START + 121.0)
    assert isinstance(core.state.phase, Running), "the node may not end after all"


def test_node_drains_once_a_replacement_is_ready() -> None:
    core = make_training_core("ab", min_workers=2)
    drain_node(core, "b", 120.0)
    assert select(Pause, deliver(core, WorkerReady("w2", "c", 1), now=START + 20.0))


def test_worker_drained_by_name_drains_even_below_the_minimum() -> None:
    core = make_training_core("ab", min_workers=2)
    drain_node(core, "b", 120.0)
    assert select(Pause, deliver(core, WorkerDraining("w1", "requested"), now=START))


def test_worker_that_joins_on_a_draining_node_is_stopped() -> None:
    core = make_training_core("aab")
    deliver(core, WorkerLost("w2", "killed"), now=START)
    quiesce(core, "w0", "w1")
    form_group(core, START)
    commit(core, 2, START)
    drain_node(core, "b", 120.0)
    assert deliver(core, WorkerReady("w3", "b", 1), now=START) == [
        StopWorker("w3", "its node is draining"),
        StartWorkers(("w4",)),
    ]


def test_node_that_does_not_end_is_used_again() -> None:
    core = make_training_core("ab", min_workers=2)
    drain_node(core, "b", 30.0)
    deliver(core, WorkerLost("w0", "killed"), now=START)
    quiesce(core, "w1")
    assert isinstance(core.state.phase, Waiting)
    assert core.state.membership.draining == {"w1"}
    deliver(core, WorkerReady("w2", "c", 1), now=START)
    assert isinstance(core.state.phase, Waiting)
    deliver(core, Woke(), now=START + 30.0 + core.state.policy.drain_grace_s)
    assert core.state.membership.node_drains == {}
    assert core.state.membership.draining == set()
    assert isinstance(core.state.phase, Forming)


def test_worker_drained_by_name_stays_drained_when_its_node_is_used_again() -> None:
    core = make_training_core("aabb")
    drain_node(core, "b", 30.0)
    deliver(core, WorkerDraining("w3", "requested"), now=START)
    deliver(core, Woke(), now=START + 90.0)
    assert core.state.membership.draining == {"w3"}


def test_notice_that_expired_is_ignored() -> None:
    core = make_training_core("aabb")
    assert deliver(core, NodeDraining("b", START - 60.0), now=START) == []
    assert core.state.membership.draining == set()


def test_node_at_risk_is_reported_and_used_further() -> None:
    core = make_training_core("aabb")
    [warned] = deliver(core, NodeAtRisk("b", "AWS rebalance recommendation"), now=START)
    assert isinstance(warned, Warned)
    assert warned.text == "node b may be reclaimed soon: AWS rebalance recommendation"
    assert core.state.membership.draining == set()


def test_snapshot_placement_avoids_a_draining_node() -> None:
    """Its worker trains on, since too few would stay; but no snapshots go there any more."""
    core = make_training_core("abc", layout="fsdp=3", min_workers=3, snapshot_every=1)
    snapshot_servers = [SnapshotServerReady(SnapshotServer(n, "", n, "host", 1)) for n in "abc"]
    [before] = select(StartSnapshots, deliver(core, *snapshot_servers, now=START))
    assert snapshot_nodes(before) == [["a", "b"], ["b", "c"], ["c", "a"]]
    [after] = select(StartSnapshots, drain_node(core, "c", 120.0))
    assert snapshot_nodes(after) == [["a", "b"], ["b", "a"], ["a"]]


def test_drains_survive_a_restart_of_the_controller() -> None:
    core = make_training_core("aabb")
    drain_node(core, "b", 30.0)
    restored = decode(type(core.state), encode(core.state))
    assert restored == core.state
    assert restored.membership.node_drains["b"].draining_workers == {"w2", "w3"}
