"""Broken and slow machines: refused before their worker joins, drained afterwards."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from test_core import open_run
from test_growth import SteppedRun
from test_quarantine import (
    make_run_with_a_starting_worker,
    make_training_run,
    newest_worker,
    select,
)

from elastic.geometry.machine_report import MachineReport
from elastic.geometry.target_layout import TargetLayout
from elastic.geometry.training_job import Job
from elastic.protocol.commands import Command, StartWorkers, StopWorker
from elastic.protocol.events import (
    GroupFormed,
    StateReady,
    WorkerDraining,
    WorkerLost,
    WorkerRaised,
    WorkerReady,
)
from elastic.protocol.notes import NodeQuarantined, Warned
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
    [warned] = select(Warned, commands)
    assert isinstance(warned, Warned) and "5.0 times as long" in warned.text
    [stopped] = select(StopWorker, commands)
    assert isinstance(stopped, StopWorker) and stopped.worker == f"w{slow}"
    assert "5.0 times as long" in stopped.cause
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
    assert not select(NodeQuarantined, commands), "the node is as good as before"


def test_workers_on_cpus_may_share_a_machine() -> None:
    run, commands = run_with_machines(HEALTHY, HEALTHY, HEALTHY)
    assert isinstance(run.core.state.phase, Forming) and not select(Warned, commands)


def begin_with_links(speeds: dict[str, float], **policy: float) -> tuple[SteppedRun, list[Command]]:
    """A run of one worker a node. A link is as fast as the slower of its two ends."""
    run = SteppedRun(open_run(1, len(speeds), **policy))
    run.core.state.job = Job(12, steps=10_000)
    for worker in speeds:
        join(run, worker, f"node-{worker}", HEALTHY)
    return run, report_links(run, speeds)


def report_links(run: SteppedRun, speeds: dict[str, float]) -> list[Command]:
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
    return commands


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
        {"w0": 1e8, "w1": 1e8, "w2": 1e9, "w3": 1e9, "w4": 1e9},  # so is the network
    ],
)
def test_other_differences_of_links_blame_no_worker(speeds: dict[str, float]) -> None:
    run, commands = begin_with_links(speeds)
    assert not select(Warned, commands) and not run.core.state.membership.draining


def test_links_of_other_machines_may_be_slow() -> None:
    run = SteppedRun(open_run(1, 9))
    run.core.state.job = Job(12, steps=10_000)
    for number in range(9):
        kind = MachineReport(0.01, "old" if number == 8 else "new")
        join(run, f"w{number}", f"node-{number}", kind)
    commands = report_links(run, {f"w{n}": 1e8 if n == 8 else 1e9 for n in range(9)})
    assert not select(Warned, commands)


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


def test_slow_device_that_comes_later_never_pauses_the_run() -> None:
    run = SteppedRun(open_run(1, 4, hang_timeout_s=1e9))
    run.core.state.job = Job(12, steps=10_000)
    for number in range(3):
        join(run, f"w{number}", "only-node", HEALTHY)
    run.wake()
    run.form()
    pauses_s = []
    for number in range(3, 9):
        commands = join(run, f"w{number}", "only-node", replace(HEALTHY, product_s=0.05))
        [stopped] = select(StopWorker, commands)
        assert isinstance(stopped, StopWorker) and "5.0 times as long" in stopped.cause
        assert isinstance(run.core.state.phase, Running), "the run does not pause for it"
        run.deliver(WorkerLost(f"w{number}", "stopped", "only-node"))
        began = run.now
        while newest_worker(run) == f"w{number}":
            run.wake()
        pauses_s.append(run.now - began)
    assert all(later >= 1.9 * earlier for earlier, later in pairwise(pauses_s)), pauses_s
    join(run, newest_worker(run), "only-node", HEALTHY)
    assert run.core.state.membership.num_staying() == 4, "a fit worker is used"


def test_degraded_member_stays_if_no_layout_fits_the_others() -> None:
    run = make_training_run("aabb")
    run.core.state.job = replace(run.core.state.job, state_bytes=4000, param_bytes=1000)
    for record in run.core.state.membership.records.values():
        record.memory_bytes = 1600
    commands = run.deliver(WorkerDraining("w3", "it is too hot", is_degraded=True))
    [warned] = select(Warned, commands)
    assert isinstance(warned, Warned) and "it stays" in warned.text
    assert isinstance(run.core.state.phase, Running) and not run.core.state.membership.draining


def test_shared_crash_does_not_release_a_node_that_failed_a_check() -> None:
    run = make_run_with_a_starting_worker("aab")
    newcomer = newest_worker(run)
    run.deliver(WorkerRaised(newcomer, 0, "health", "3 uncorrectable ECC errors", node="b"))
    run.deliver(WorkerLost("w0", "exit code -11", "a", is_crash=True))
    assert "b" in run.core.state.quarantine.until


def test_failing_machine_does_not_end_a_run_whose_other_workers_still_start() -> None:
    run = SteppedRun(open_run(1, 4))
    for _ in range(12):
        newcomer = newest_worker(run)
        run.now += 1.0
        run.deliver(WorkerRaised(newcomer, 0, "health", "too hot", node="bad"))
        while newest_worker(run) == newcomer:
            run.wake()
    assert run.core.state.ending is None, "w0, w1 and w2 still warm up"


def test_two_workers_that_come_later_on_one_gpu_get_one_rank() -> None:
    run = SteppedRun(open_run(1, 4, hang_timeout_s=1e9))
    run.core.state.job = Job(12, steps=10_000)
    for number in range(2):
        join(run, f"w{number}", str(number), replace(HEALTHY, device_id=f"GPU-{number}"))
    run.wake()
    run.form()
    for worker in ("w2", "w3"):
        commands = join(run, worker, "new", replace(HEALTHY, device_id="GPU-new"))
    [stopped] = select(StopWorker, commands)
    assert isinstance(stopped, StopWorker) and stopped.worker == "w3"
    assert "w2 has the same GPU" in stopped.cause


def test_slow_links_do_not_end_a_drain() -> None:
    """A worker that drains has slow links, and the run would need it if it did not drain."""
    run = SteppedRun(open_run(3, 3))
    run.core.state.job = Job(12, steps=10_000)
    for worker in ("w0", "w1", "w2"):
        join(run, worker, f"node-{worker}", HEALTHY)
    run.deliver(WorkerDraining("w1", "requested"))
    commands = report_links(run, {"w0": 1e9, "w1": 1e8, "w2": 1e9})
    [warned] = select(Warned, commands)
    assert isinstance(warned, Warned) and "it stays" in warned.text
    assert run.core.state.membership.draining == {"w1"}
