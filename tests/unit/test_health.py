"""Broken and slow machines: refused before their worker joins, drained afterwards."""

from __future__ import annotations

from dataclasses import replace

import pytest
from test_core import open_run
from test_growth import SteppedRun
from test_quarantine import make_training_run, newest_worker, select

from elastic.geometry.machine_report import MachineReport
from elastic.geometry.target_layout import TargetLayout
from elastic.geometry.training_job import Job
from elastic.protocol.commands import Command, NodeQuarantined, StartWorkers, StopWorker, Warned
from elastic.protocol.events import (
    GroupFormed,
    StateReady,
    WorkerDraining,
    WorkerRaised,
    WorkerReady,
)
from elastic.protocol.phases import Forming, Pausing, Running, Waiting

HEALTHY = MachineReport(0.01, "kind")


def join(run: SteppedRun, worker: str, node: str, machine: MachineReport) -> list[Command]:
    return run.deliver(WorkerReady(worker, node, 1, digest="same", machine=machine))


def run_with_machines(
    *machines: MachineReport, min_workers: int = 1
) -> tuple[SteppedRun, list[Command]]:
    """A run that forms its first generation, with one worker on each of nodes 0, 1, 2, ..."""
    run = SteppedRun(open_run(min_workers, len(machines)))
    run.core.state.job = Job(12, steps=10_000)
    commands: list[Command] = []
    for number, machine in enumerate(machines):
        commands += join(run, f"w{number}", str(number), machine)
    return run, commands


def test_failed_check_quarantines_the_node_at_once() -> None:
    run = make_training_run("aab")
    run.lose("w2")
    run.form()
    newcomer = newest_worker(run)
    commands = run.deliver(
        WorkerRaised(newcomer, 0, "health", "node b: 3 uncorrectable ECC errors", node="b")
    )
    [quarantined] = select(NodeQuarantined, commands)
    assert isinstance(quarantined, NodeQuarantined) and quarantined.node == "b"
    assert "ECC" in quarantined.cause
    assert StopWorker(newcomer, "node b: 3 uncorrectable ECC errors") in commands
    assert isinstance(run.core.state.phase, Running)
    commands = run.wake()
    assert select(StartWorkers, commands) == [StartWorkers((newest_worker(run),), ("b",))]


def test_failed_check_does_not_quarantine_the_only_node() -> None:
    run = make_training_run("aa")
    run.lose("w1")
    run.form()
    newcomer = newest_worker(run)
    commands = run.deliver(WorkerRaised(newcomer, 0, "health", "too slow", node="a"))
    assert not select(NodeQuarantined, commands)
    assert [type(command) for command in commands] == [Warned, StopWorker]
    assert run.core.state.ending is None


def test_late_report_of_a_failed_check_changes_nothing() -> None:
    run = make_training_run("ab")
    assert run.deliver(WorkerRaised("w9", 0, "health", "too slow", node="b")) == []


@pytest.mark.parametrize("slow", [0, 1, 3])
def test_device_far_slower_than_the_others_gets_no_rank(slow: int) -> None:
    machines = [HEALTHY] * 4
    machines[slow] = replace(HEALTHY, product_s=0.05)
    run, commands = run_with_machines(*machines)
    state = run.core.state
    assert isinstance(state.phase, Forming)
    assert f"w{slow}" not in state.phase.attempt.assignment.members
    assert StopWorker(f"w{slow}", "it was drained") in commands
    [warned] = select(Warned, commands)
    assert isinstance(warned, Warned) and "5.0 times as long" in warned.text
    assert [node.node for node in select(NodeQuarantined, commands)] == [str(slow)]  # type: ignore[attr-defined]


def test_devices_of_another_kind_may_be_slow() -> None:
    other_kind = MachineReport(0.1, "other kind")
    run, commands = run_with_machines(HEALTHY, HEALTHY, HEALTHY, other_kind)
    assert isinstance(run.core.state.phase, Forming)
    assert not select(Warned, commands) and not run.core.state.membership.draining


def test_slow_worker_without_which_the_run_could_not_go_on_stays() -> None:
    slow = replace(HEALTHY, product_s=0.05)
    run, commands = run_with_machines(HEALTHY, HEALTHY, HEALTHY, slow, min_workers=4)
    assert isinstance(run.core.state.phase, Forming)
    [warned] = select(Warned, commands)
    assert isinstance(warned, Warned) and "it stays" in warned.text
    assert not run.core.state.membership.draining


def test_second_worker_on_one_gpu_gets_no_rank() -> None:
    machines = [replace(HEALTHY, device_id=name) for name in ("GPU-a", "GPU-b", "GPU-a")]
    run, commands = run_with_machines(*machines)
    state = run.core.state
    assert isinstance(state.phase, Forming)
    assert state.phase.attempt.assignment.members == ("w0", "w1")
    [warned] = select(Warned, commands)
    assert isinstance(warned, Warned)
    assert "w0 has the same GPU" in warned.text and "CUDA_VISIBLE_DEVICES" in warned.text


def test_workers_on_cpus_may_share_a_machine() -> None:
    run, commands = run_with_machines(HEALTHY, HEALTHY, HEALTHY)
    assert isinstance(run.core.state.phase, Forming) and not select(Warned, commands)


def begin_with_links(speeds: dict[str, float], **policy: float) -> tuple[SteppedRun, list[Command]]:
    """A run of one worker a node. A link is as fast as the slower of its two ends."""
    run = SteppedRun(open_run(1, len(speeds), **policy))
    run.core.state.job = Job(12, steps=10_000)
    for worker in speeds:
        join(run, worker, f"node-{worker}", HEALTHY)
    state = run.core.state
    assert isinstance(state.phase, Forming)
    members = state.phase.attempt.assignment.members
    run.deliver(*(GroupFormed(worker, state.generation) for worker in members))
    commands: list[Command] = []
    for rank, worker in enumerate(members):
        links = tuple(
            (peer, min(speeds[worker], speeds[peer]))
            for distance in (1, 2)
            if (peer := members[(rank - distance) % len(members)]) != worker
        )
        ready = StateReady(worker, state.generation, 0, 0, 0.0, 0, 0, 0, bandwidths=links)
        commands += run.deliver(ready)
    return run, commands


@pytest.mark.parametrize("size", [3, 4, 8])
def test_worker_all_of_whose_links_are_slow_leaves_at_the_first_boundary(size: int) -> None:
    run, commands = begin_with_links({f"w{n}": 1e8 if n == 2 else 1e9 for n in range(size)})
    [warned] = select(Warned, commands)
    assert isinstance(warned, Warned) and warned.text.startswith("w2 on node-w2: none of its links")
    assert [node.node for node in select(NodeQuarantined, commands)] == ["node-w2"]  # type: ignore[attr-defined]
    assert isinstance(run.core.state.phase, Running | Pausing)
    run.commit()
    run.pause()
    state = run.core.state
    assert isinstance(state.phase, Forming)
    assert "w2" not in state.phase.attempt.assignment.members


@pytest.mark.parametrize(
    "speeds",
    [
        {"w0": 1e8, "w1": 1e9},  # a link has two ends
        {"w0": 3e8, "w1": 1e9, "w2": 1e9, "w3": 1e9},  # within the factor
        {"w0": 1e8, "w1": 1e8, "w2": 1e9, "w3": 1e9},  # that is how the network is
    ],
)
def test_other_differences_of_links_blame_no_worker(speeds: dict[str, float]) -> None:
    run, commands = begin_with_links(speeds)
    assert not select(Warned, commands) and not run.core.state.membership.draining


def test_factor_0_compares_nothing() -> None:
    _, commands = begin_with_links({"w0": 1e8, "w1": 1e9, "w2": 1e9}, health_factor=0.0)
    assert not select(Warned, commands)


def test_degraded_member_leaves_at_the_next_step_boundary() -> None:
    run = make_training_run("aabb")
    commands = run.deliver(WorkerDraining("w3", "2 new uncorrectable ECC errors", is_degraded=True))
    [quarantined] = select(NodeQuarantined, commands)
    assert isinstance(quarantined, NodeQuarantined) and quarantined.node == "b"
    assert isinstance(run.core.state.phase, Pausing)
    run.pause()
    assert isinstance(run.core.state.phase, Forming)
    assert run.core.state.phase.attempt.assignment.members == ("w0", "w1", "w2")


def test_degraded_member_stays_if_the_run_needs_it() -> None:
    run = make_training_run("aabb", min_workers=4)
    commands = run.deliver(WorkerDraining("w3", "it is too hot", is_degraded=True))
    [warned] = select(Warned, commands)
    assert isinstance(warned, Warned) and "it stays" in warned.text
    assert isinstance(run.core.state.phase, Running)


def test_new_workers_measure_their_links_with_members_on_different_nodes() -> None:
    run = SteppedRun(open_run(1, 4))
    run.core.state.job = Job(12, steps=10_000)
    run.core.state.layouts.target = TargetLayout.parse("dp=4", 4)
    for number, node in enumerate("aabc"):
        machine = replace(HEALTHY, host=node, port=100 + number)
        join(run, f"w{number}", node, machine)
    assert not isinstance(run.core.state.phase, Waiting)
    run.form()
    run.lose("w3")
    run.form()
    [record] = [name for name in run.core.state.membership.records if name == newest_worker(run)]
    commands = run.deliver(WorkerRaised(record, 0, "machine", "no route"))
    [start] = select(StartWorkers, [*commands, *run.wake()])
    assert isinstance(start, StartWorkers)
    assert sorted(peer.node for peer in start.peers) == ["a", "b"]
    assert all(peer.host == peer.node and peer.port for peer in start.peers)
