"""Quarantine of nodes: when it starts and ends, and what happens to workers there."""

from __future__ import annotations

from test_core import open_run
from test_growth import SteppedRun

from elastic.geometry.target_layout import TargetLayout
from elastic.geometry.training_job import Job
from elastic.protocol.commands import Command, StartWorkers, Stopped, StopWorker
from elastic.protocol.events import (
    NodeDraining,
    Quiesced,
    Woke,
    WorkerDraining,
    WorkerLost,
    WorkerRaised,
    WorkerReady,
)
from elastic.protocol.notes import NodeQuarantined, NodeReleased, Waited
from elastic.protocol.phases import Forming, Running, Waiting
from elastic.protocol.wire import decode, encode


def join(run: SteppedRun, worker: str, node: str) -> list[Command]:
    return run.deliver(WorkerReady(worker, node, 1, digest="same"))


def make_training_run(
    nodes: str, min_workers: int = 1, num_standby: int = 0, **policy: float
) -> SteppedRun:
    """One worker per letter, on the node of that name; the last `num_standby` are on standby."""
    run = SteppedRun(open_run(min_workers, len(nodes), hang_timeout_s=1e9, **policy))
    run.core.state.layouts.target = TargetLayout.parse(f"dp={len(nodes) - num_standby}", len(nodes))
    run.core.state.job = Job(12, steps=10_000)
    for number, node in enumerate(nodes):
        join(run, f"w{number}", node)
    if isinstance(run.core.state.phase, Waiting):
        run.wake()
    run.form()
    return run


def newest_worker(run: SteppedRun) -> str:
    return f"w{run.core.state.membership.next_worker - 1}"


def crash_starting_workers(
    run: SteppedRun, node: str, times: int = 1, after_s: float = 5.0
) -> list[Command]:
    """Let the newest worker die while it warms up, and the core start its replacement."""
    commands: list[Command] = []
    for _ in range(times):
        run.now += after_s
        dead_worker = newest_worker(run)
        commands += run.deliver(WorkerLost(dead_worker, "exit code -11", node))
        while newest_worker(run) == dead_worker:
            commands += run.wake()
    return commands


def select(kind: type, commands: list[Command]) -> list[Command]:
    return [command for command in commands if isinstance(command, kind)]


def make_run_with_a_starting_worker(nodes: str = "aab", **policy: float) -> SteppedRun:
    """The last member has crashed once, and its replacement is starting."""
    run = make_training_run(nodes, **policy)
    lost_worker = f"w{len(nodes) - 1}"
    run.lose(lost_worker)
    run.form()
    assert (
        newest_worker(run)
        in run.core.state.membership.records.keys() - run.core.state.membership.warm
    )
    return run


def test_node_with_repeated_crashes_is_quarantined() -> None:
    run = make_run_with_a_starting_worker()
    assert select(NodeQuarantined, crash_starting_workers(run, "b")) == []
    commands = crash_starting_workers(run, "b")
    [quarantined] = select(NodeQuarantined, commands)
    assert quarantined == NodeQuarantined(
        "b", quarantined.until, "workers have crashed there 3 times"
    )
    assert select(StartWorkers, commands) == [StartWorkers((newest_worker(run),), ("b",))]
    assert isinstance(run.core.state.phase, Running), "the others train on"


def test_node_with_crashes_in_quick_succession_is_quarantined() -> None:
    run = make_run_with_a_starting_worker(restart_backoff_s=0.1)
    commands = crash_starting_workers(run, "b", 2, after_s=0.3)
    assert [quarantined.node for quarantined in select(NodeQuarantined, commands)] == ["b"]


def test_crashes_outside_the_window_do_not_count() -> None:
    run = make_run_with_a_starting_worker(crash_window_s=300.0)
    crash_starting_workers(run, "b")
    run.commit(600)
    assert select(NodeQuarantined, crash_starting_workers(run, "b", 2)) == []
    assert select(NodeQuarantined, crash_starting_workers(run, "b"))


def test_only_node_is_not_quarantined() -> None:
    run = make_run_with_a_starting_worker("aa")
    assert select(NodeQuarantined, crash_starting_workers(run, "a", 10)) == []
    assert run.core.state.ending is None


def test_quarantine_after_0_disables_quarantine() -> None:
    run = make_run_with_a_starting_worker(quarantine_after=0)
    assert select(NodeQuarantined, crash_starting_workers(run, "b", 10)) == []


def test_loss_of_a_whole_node_counts_as_one_crash() -> None:
    run = make_training_run("aabbbb", quarantine_after=2)
    commands = run.deliver(*(WorkerLost(f"w{i}", "killed", "b") for i in range(2, 6)))
    assert select(NodeQuarantined, commands) == []


def test_losses_on_several_nodes_at_once_count_for_no_node() -> None:
    run = make_training_run("aabc", quarantine_after=1)
    commands = run.deliver(WorkerLost("w1", "killed", "a"), WorkerLost("w2", "killed", "b"))
    assert [c.node for c in select(NodeQuarantined, commands)] == ["a"], (
        "the first loss counts while it is the only one"
    )
    assert run.core.state.quarantine.until == {}, "the second loss at that moment clears the node"


def test_planned_drain_is_no_crash() -> None:
    run = make_training_run("aab", quarantine_after=1)
    run.deliver(WorkerDraining("w2", "requested"))
    assert select(NodeQuarantined, run.deliver(WorkerLost("w2", "killed", "b"))) == []
    run = make_training_run("aab", quarantine_after=1)
    run.deliver(NodeDraining("b", run.now + 1e6))
    assert select(NodeQuarantined, run.deliver(WorkerLost("w2", "its node is gone", "b"))) == []


def test_crashes_that_follow_a_batch_do_not_count_for_the_node() -> None:
    """The same step ends workers on b, then on a: this clears b."""
    run = make_training_run("aabbb", quarantine_after=2)
    run.lose("w2")
    run.core.step(run.now, WorkerReady("x", "a", 1))
    participants = run.core.state.phase.attempt.plan.participants  # type: ignore[union-attr]
    assert "w2" not in participants
    run.now += 10.0
    commands = run.deliver(WorkerLost("w3", "exit code -11", "b", is_crash=True))
    assert select(NodeQuarantined, commands), "both crashes on one node count"
    run.now += 10.0
    commands = run.deliver(WorkerLost("w1", "killed", "a"))
    [released] = select(NodeReleased, commands)
    assert (released.node, run.core.state.quarantine.until) == ("b", {})


def test_node_is_not_quarantined_if_workers_on_others_crash_as_often() -> None:
    run = make_run_with_a_starting_worker("abc")
    crash_starting_workers(run, "a")
    crash_starting_workers(run, "b")
    assert select(NodeQuarantined, crash_starting_workers(run, "b", 1)) == []
    assert run.core.state.quarantine.until == {}


def test_members_on_a_quarantined_node_train_on() -> None:
    run = make_training_run("aabb", quarantine_after=2)
    run.lose("w3")
    run.form()
    join(run, "w4", "b")
    run.pause()
    run.form()
    run.now += 5.0
    run.lose("w4")
    assert "b" in run.core.state.quarantine.until
    run.form()
    assert run.core.state.live.members() == ("w0", "w1", "w2")
    assert run.core.state.membership.records["w2"].node == "b"
    assert run.core.state.membership.records["w5"].quarantined == ("b",)


def test_standby_workers_on_a_quarantined_node_are_stopped() -> None:
    run = make_training_run("aabb", num_standby=1, quarantine_after=1)
    commands = run.deliver(WorkerLost("w2", "killed", "b"))
    assert select(StopWorker, commands) == [StopWorker("w3", "its node is quarantined")]


def test_standby_worker_on_a_quarantined_node_stays_if_the_run_needs_it() -> None:
    run = make_training_run("aabb", min_workers=3, num_standby=1, quarantine_after=1)
    commands = run.deliver(WorkerLost("w2", "killed", "b"))
    assert select(NodeQuarantined, commands) and not select(StopWorker, commands)


def test_worker_that_joins_on_a_quarantined_node_is_stopped() -> None:
    run = make_run_with_a_starting_worker()
    crash_starting_workers(run, "b", 2)
    late_worker = newest_worker(run)
    commands = join(run, late_worker, "b")
    assert select(StopWorker, commands) == [StopWorker(late_worker, "its node is quarantined")]
    [start] = select(StartWorkers, commands)
    assert start.quarantined == ("b",)
    run.deliver(WorkerLost(late_worker, "stopped", "b"))
    assert join(run, newest_worker(run), "a") and run.core.state.membership.warm >= {
        newest_worker(run)
    }


def test_quarantined_node_is_used_again_after_its_time() -> None:
    run = make_run_with_a_starting_worker(quarantine_s=40.0, quarantine_patience_s=100.0)
    crash_starting_workers(run, "b", 2)
    waiting_worker, until = newest_worker(run), run.core.state.quarantine.until["b"]
    while run.core.state.quarantine.until:
        commands = run.wake()
    assert run.now == until
    assert commands == [
        NodeReleased("b", "its quarantine is over"),
        StopWorker(waiting_worker, "it can now start on more nodes"),
        StartWorkers((newest_worker(run),), ()),
    ]
    assert select(NodeQuarantined, crash_starting_workers(run, "b", 2)) == [], (
        "earlier crashes do not count any more"
    )
    assert select(NodeQuarantined, crash_starting_workers(run, "b"))


def test_quarantined_node_is_released_early_if_other_nodes_have_too_few_workers() -> None:
    run = make_training_run("aab", min_workers=3, start_timeout_s=60.0, quarantine_patience_s=100.0)
    run.lose("w2")
    assert isinstance(run.core.state.phase, Waiting)
    commands = crash_starting_workers(run, "b", 2)
    assert select(NodeQuarantined, commands)
    quarantined_at = run.now
    while run.core.state.quarantine.until:
        commands = run.wake()
    assert run.now <= quarantined_at + 60.0
    released = NodeReleased("b", "too few workers arrived on other nodes")
    assert select(NodeReleased, commands) == [released]
    join(run, newest_worker(run), "b")
    assert isinstance(run.core.state.phase, Forming)


def test_wait_for_workers_is_reported_during_a_quarantine() -> None:
    run = make_training_run("ab", min_workers=2)
    run.lose("w1")
    assert not select(Stopped, crash_starting_workers(run, "b", 2))
    assert isinstance(run.core.state.phase, Waiting)
    assert "1 of at least 2 workers" in run.core.state.phase.reason
    assert select(Waited, run.wake()) == []


def test_quarantine_state_survives_the_journal() -> None:
    run = make_run_with_a_starting_worker()
    crash_starting_workers(run, "b", 2)
    assert decode(type(run.core.state), encode(run.core.state)) == run.core.state


def test_losses_at_the_same_moment_count_for_no_node_even_among_starting_workers() -> None:
    run = make_training_run("aabc", quarantine_after=1)
    run.deliver(WorkerLost("w3", "killed", "c"))
    run.deliver(WorkerLost("w2", "killed", "b"))
    assert run.core.state.quarantine.until == {}
    run.now += 5.0
    commands = run.deliver(WorkerLost("w1", "killed", "a"))
    assert select(NodeQuarantined, commands) == [], "all losses belong to one step"


def kill_newest_member(run: SteppedRun, node: str, after_s: float, is_crash: bool = False) -> float:
    """Let the replacement of the last loss join on this node, train for some time and be killed.

    Returns the time at which that quarantines the node, or 0.
    """
    join(run, newest_worker(run), node)
    while isinstance(run.core.state.phase, Running):
        run.wake()  # a run whose members change often delays its growth
    run.pause()
    run.form()
    run.now += after_s
    commands = run.deliver(WorkerLost(newest_worker(run), "exit code -9", node, is_crash))
    survivors = [w for w in run.core.state.live.members() if w in run.core.state.membership.records]
    generation, step = run.core.state.generation, run.core.state.committed_step
    run.deliver(*(Quiesced(w, generation, step) for w in survivors))
    run.form()
    return run.now if select(NodeQuarantined, commands) else 0.0


def test_kills_after_useful_work_do_not_quarantine_a_node_but_crashes_do() -> None:
    run = make_run_with_a_starting_worker()
    assert not any(kill_newest_member(run, "b", after_s=60.0) for _ in range(10))
    run = make_run_with_a_starting_worker()
    crashes = [kill_newest_member(run, "b", after_s=60.0, is_crash=True) for _ in range(2)]
    assert crashes[-1]


def break_device_of_newest_member(run: SteppedRun, node: str, after_s: float) -> list[Command]:
    """Let the replacement join on this node and train for some time, then break its device."""
    worker = newest_worker(run)
    join(run, worker, node)
    while isinstance(run.core.state.phase, Running):
        run.wake()
    run.pause()
    run.form()
    run.now += after_s
    generation, step = run.core.state.generation, run.core.state.committed_step
    raised = WorkerRaised(worker, generation, "device", "CUDA error: uncorrectable ECC error", "")
    assert select(StopWorker, run.deliver(raised))
    commands = run.deliver(WorkerLost(worker, "exit code -9", node))
    survivors = [w for w in run.core.state.live.members() if w in run.core.state.membership.records]
    commands += run.deliver(*(Quiesced(w, generation, step) for w in survivors))
    run.form()
    return commands


def test_broken_devices_quarantine_a_node_also_after_long_useful_work() -> None:
    run = make_training_run("aab")
    run.lose("w2")
    run.form()
    run.core.state.quarantine.crashes = []
    commands_of_quarantine = [
        select(NodeQuarantined, break_device_of_newest_member(run, "b", 60.0)) for _ in range(3)
    ]
    assert [bool(quarantined) for quarantined in commands_of_quarantine] == [False, False, True]
    assert "b" in run.core.state.quarantine.until


def test_broken_device_of_a_draining_worker_counts() -> None:
    run = make_training_run("aab", quarantine_after=1)
    run.deliver(WorkerDraining("w2", "requested"))
    generation = run.core.state.generation
    run.deliver(WorkerRaised("w2", generation, "device", "CUDA error", ""))
    assert select(NodeQuarantined, run.deliver(WorkerLost("w2", "exit code -9", "b")))


def test_kills_before_any_useful_work_quarantine_a_node() -> None:
    run = make_run_with_a_starting_worker()
    assert [bool(kill_newest_member(run, "b", after_s=1.0)) for _ in range(2)] == [False, True]


def test_quarantined_node_without_alternative_is_reused_after_doubling_pauses() -> None:
    run = make_run_with_a_starting_worker(quarantine_patience_s=30.0)
    pauses = []
    for num_crashes in (2, 3, 3):
        for _ in range(num_crashes):
            quarantined_at = kill_newest_member(run, "b", after_s=1.0)
        assert quarantined_at
        while run.core.state.quarantine.until:
            commands = run.wake()
        pauses.append(run.now - quarantined_at)
        assert select(StartWorkers, commands)[-1].quarantined == ()
    assert [round(pause) for pause in pauses] == [30, 60, 120]


def test_quarantine_lasts_while_other_capacity_is_there() -> None:
    run = make_run_with_a_starting_worker(quarantine_patience_s=30.0, standby_timeout_s=1e9)
    kill_newest_member(run, "b", after_s=1.0)
    quarantined_at = kill_newest_member(run, "b", after_s=1.0)
    join(run, newest_worker(run), "a")
    run.pause()
    run.form()
    run.now = quarantined_at + 3000.0
    assert select(NodeReleased, run.deliver(Woke())) == []
    assert "b" in run.core.state.quarantine.until


def test_two_bad_nodes_of_many_are_both_quarantined() -> None:
    run = make_training_run("aabbccddee", quarantine_after=3)
    for crash in range(3):
        for node in ("d", "e"):
            run.now += 5.0
            member = next(
                w
                for w in run.core.state.live.members()
                if run.core.state.membership.records[w].node == node
            )
            run.deliver(WorkerLost(member, "exit code -11", node, is_crash=True))
            survivors = [
                w for w in run.core.state.live.members() if w in run.core.state.membership.records
            ]
            generation, step = run.core.state.generation, run.core.state.committed_step
            run.deliver(*(Quiesced(w, generation, step) for w in survivors))
            run.form()
            joiner = newest_worker(run)
            if crash < 2:
                join(run, joiner, node)
                while isinstance(run.core.state.phase, Running):
                    run.wake()
                run.pause()
                run.form()
    assert run.core.state.quarantine.until.keys() == {"d", "e"}
