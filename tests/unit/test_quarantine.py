"""Which nodes are avoided, and what comes of it."""

from __future__ import annotations

from test_core import opened
from test_growth import Life

from elastic.geometry.target_layout import TargetLayout
from elastic.geometry.training_job import Job
from elastic.protocol.commands import (
    Command,
    NodeQuarantined,
    NodeReleased,
    StartWorkers,
    Stopped,
    StopWorker,
    Waited,
)
from elastic.protocol.events import (
    NodeDraining,
    Quiesced,
    Woke,
    WorkerDraining,
    WorkerLost,
    WorkerRaised,
    WorkerReady,
)
from elastic.protocol.phases import Forming, Running, Waiting
from elastic.protocol.wire import decode, encode


def come(life: Life, worker: str, node: str) -> list[Command]:
    return life.tell(WorkerReady(worker, node, 1, digest="same"))


def training(nodes: str, least: int = 1, spare: int = 0, **policy: float) -> Life:
    """A worker a letter, on the node of that name; the last ones are spares."""
    life = Life(opened(least, len(nodes), hang_timeout_s=1e9, **policy))
    life.core.state.layouts.target = TargetLayout.parse(f"dp={len(nodes) - spare}", len(nodes))
    life.core.state.job = Job(12, steps=10_000)
    for number, node in enumerate(nodes):
        come(life, f"w{number}", node)
    if isinstance(life.core.state.phase, Waiting):
        life.wake()
    life.form()
    return life


def newest(life: Life) -> str:
    return f"w{life.core.state.membership.next_worker - 1}"


def crash_as_they_start(
    life: Life, node: str, times: int = 1, after_s: float = 5.0
) -> list[Command]:
    """The newest worker dies while it warms up there; another is started in its place."""
    commands: list[Command] = []
    for _ in range(times):
        life.now += after_s
        dead = newest(life)
        commands += life.tell(WorkerLost(dead, "exit code -11", node))
        while newest(life) == dead:
            commands += life.wake()
    return commands


def of(kind: type, commands: list[Command]) -> list[Command]:
    return [command for command in commands if isinstance(command, kind)]


def with_one_missing(nodes: str = "aab", **policy: float) -> Life:
    """The last has crashed once, as a member, and its replacement is starting."""
    life = training(nodes, **policy)
    lost = f"w{len(nodes) - 1}"
    life.lose(lost)
    life.form()
    assert (
        newest(life) in life.core.state.membership.records.keys() - life.core.state.membership.warm
    )
    return life


def test_a_node_on_which_workers_crash_again_and_again_is_avoided() -> None:
    life = with_one_missing()
    assert of(NodeQuarantined, crash_as_they_start(life, "b")) == []
    commands = crash_as_they_start(life, "b")
    [quarantined] = of(NodeQuarantined, commands)
    assert quarantined == NodeQuarantined(
        "b", quarantined.until, "workers have crashed there 3 times"
    )
    assert of(StartWorkers, commands) == [StartWorkers((newest(life),), ("b",))]
    assert isinstance(life.core.state.phase, Running), "the others train on"


def test_however_quickly_they_start_and_crash() -> None:
    life = with_one_missing(restart_backoff_s=0.1)
    commands = crash_as_they_start(life, "b", 2, after_s=0.3)
    assert [quarantined.node for quarantined in of(NodeQuarantined, commands)] == ["b"]


def test_old_crashes_do_not_count() -> None:
    life = with_one_missing(crash_window_s=300.0)
    crash_as_they_start(life, "b")
    life.commit(600)
    assert of(NodeQuarantined, crash_as_they_start(life, "b", 2)) == []
    assert of(NodeQuarantined, crash_as_they_start(life, "b"))


def test_the_only_node_is_not_avoided() -> None:
    life = with_one_missing("aa")
    assert of(NodeQuarantined, crash_as_they_start(life, "a", 10)) == []
    assert life.core.state.ending is None


def test_zero_is_never() -> None:
    life = with_one_missing(quarantine_after=0)
    assert of(NodeQuarantined, crash_as_they_start(life, "b", 10)) == []


def test_a_node_that_is_lost_with_all_its_workers_has_crashed_once() -> None:
    life = training("aabbbb", quarantine_after=2)
    commands = life.tell(*(WorkerLost(f"w{i}", "killed", "b") for i in range(2, 6)))
    assert of(NodeQuarantined, commands) == []


def test_a_loss_that_strikes_several_nodes_is_none_of_a_node() -> None:
    life = training("aabc", quarantine_after=1)
    commands = life.tell(WorkerLost("w1", "killed", "a"), WorkerLost("w2", "killed", "b"))
    assert [c.node for c in of(NodeQuarantined, commands)] == ["a"], "the first alone was one"
    assert life.core.state.quarantine.until == {}, "until others were struck at that moment"


def test_leaving_by_plan_is_no_crash() -> None:
    life = training("aab", quarantine_after=1)
    life.tell(WorkerDraining("w2", "asked to"))
    assert of(NodeQuarantined, life.tell(WorkerLost("w2", "killed", "b"))) == []
    life = training("aab", quarantine_after=1)
    life.tell(NodeDraining("b", life.now + 1e6))
    assert of(NodeQuarantined, life.tell(WorkerLost("w2", "its node is gone", "b"))) == []


def test_what_follows_the_batch_is_not_the_nodes_fault() -> None:
    """The same step ends workers on b, then on a: b is cleared of it."""
    life = training("aabbb", quarantine_after=2)
    life.lose("w2")
    life.core.step(life.now, WorkerReady("x", "a", 1))
    participants = life.core.state.phase.attempt.plan.participants  # type: ignore[union-attr]
    assert "w2" not in participants
    life.now += 10.0
    commands = life.tell(WorkerLost("w3", "exit code -11", "b", is_crash=True))
    assert of(NodeQuarantined, commands), "of two on one node both count"
    life.now += 10.0
    commands = life.tell(WorkerLost("w1", "killed", "a"))
    [cleared] = of(NodeReleased, commands)
    assert (cleared.node, life.core.state.quarantine.until) == ("b", {})


def test_where_others_crash_as_often_it_is_not_the_node() -> None:
    life = with_one_missing("abc")
    crash_as_they_start(life, "a")
    crash_as_they_start(life, "b")
    assert of(NodeQuarantined, crash_as_they_start(life, "b", 1)) == []
    assert life.core.state.quarantine.until == {}


def test_members_there_train_on() -> None:
    life = training("aabb", quarantine_after=2)
    life.lose("w3")
    life.form()
    come(life, "w4", "b")
    life.pause()
    life.form()
    life.now += 5.0
    life.lose("w4")
    assert "b" in life.core.state.quarantine.until
    life.form()
    assert life.core.state.live.members() == ("w0", "w1", "w2")
    assert life.core.state.membership.records["w2"].node == "b"
    assert life.core.state.membership.records["w5"].quarantined == ("b",)


def test_spares_there_are_let_go() -> None:
    life = training("aabb", spare=1, quarantine_after=1)
    commands = life.tell(WorkerLost("w2", "killed", "b"))
    assert of(StopWorker, commands) == [StopWorker("w3", "its node is quarantined")]


def test_a_spare_there_stays_if_there_are_too_few_others() -> None:
    life = training("aabb", least=3, spare=1, quarantine_after=1)
    commands = life.tell(WorkerLost("w2", "killed", "b"))
    assert of(NodeQuarantined, commands) and not of(StopWorker, commands)


def test_who_comes_up_on_an_avoided_node_is_sent_away() -> None:
    life = with_one_missing()
    crash_as_they_start(life, "b", 2)
    late = newest(life)
    commands = come(life, late, "b")
    assert of(StopWorker, commands) == [StopWorker(late, "its node is quarantined")]
    [start] = of(StartWorkers, commands)
    assert start.quarantined == ("b",)
    life.tell(WorkerLost(late, "stopped", "b"))
    assert come(life, newest(life), "a") and life.core.state.membership.warm >= {newest(life)}


def test_after_a_while_it_is_used_again() -> None:
    life = with_one_missing(quarantine_s=40.0, quarantine_patience_s=100.0)
    crash_as_they_start(life, "b", 2)
    waiting, until = newest(life), life.core.state.quarantine.until["b"]
    while life.core.state.quarantine.until:
        commands = life.wake()
    assert life.now == until
    assert commands == [
        NodeReleased("b", "its quarantine is over"),
        StopWorker(waiting, "it can now start on more nodes"),
        StartWorkers((newest(life),), ()),
    ]
    assert of(NodeQuarantined, crash_as_they_start(life, "b", 2)) == [], "all is forgiven"
    assert of(NodeQuarantined, crash_as_they_start(life, "b"))


def test_it_is_used_again_where_there_are_too_few_without_it() -> None:
    life = training("aab", least=3, start_timeout_s=60.0, quarantine_patience_s=100.0)
    life.lose("w2")
    assert isinstance(life.core.state.phase, Waiting)
    commands = crash_as_they_start(life, "b", 2)
    assert of(NodeQuarantined, commands)
    avoided_at = life.now
    while life.core.state.quarantine.until:
        commands = life.wake()
    assert life.now <= avoided_at + 60.0
    released = NodeReleased("b", "too few workers arrived on other nodes")
    assert of(NodeReleased, commands) == [released]
    come(life, newest(life), "b")
    assert isinstance(life.core.state.phase, Forming)


def test_it_is_told_that_the_run_waits_meanwhile() -> None:
    life = training("ab", least=2)
    life.lose("w1")
    assert not of(Stopped, crash_as_they_start(life, "b", 2))
    assert isinstance(life.core.state.phase, Waiting)
    assert "1 of at least 2 workers" in life.core.state.phase.reason
    assert of(Waited, life.wake()) == []


def test_the_state_survives_the_journal() -> None:
    life = with_one_missing()
    crash_as_they_start(life, "b", 2)
    assert decode(type(life.core.state), encode(life.core.state)) == life.core.state


def test_what_strikes_others_at_that_moment_as_they_start_was_not_the_node() -> None:
    life = training("aabc", quarantine_after=1)
    life.tell(WorkerLost("w3", "killed", "c"))
    life.tell(WorkerLost("w2", "killed", "b"))
    assert life.core.state.quarantine.until == {}
    life.now += 5.0
    commands = life.tell(WorkerLost("w1", "killed", "a"))
    assert of(NodeQuarantined, commands) == [], "all of one step"


def kill_newest_member(life: Life, node: str, after_s: float, is_crash: bool = False) -> float:
    """The replacement of the last loss joins on this node, trains for some time and is killed.

    Returns when the node is quarantined by that, or 0.
    """
    come(life, newest(life), node)
    while isinstance(life.core.state.phase, Running):
        life.wake()  # a run whose members change often grows later
    life.pause()
    life.form()
    life.now += after_s
    commands = life.tell(WorkerLost(newest(life), "exit code -9", node, is_crash))
    survivors = [
        w for w in life.core.state.live.members() if w in life.core.state.membership.records
    ]
    generation, step = life.core.state.generation, life.core.state.committed_step
    life.tell(*(Quiesced(w, generation, step) for w in survivors))
    life.form()
    return life.now if of(NodeQuarantined, commands) else 0.0


def test_kills_after_useful_work_do_not_quarantine_a_node_but_crashes_do() -> None:
    life = with_one_missing()
    assert not any(kill_newest_member(life, "b", after_s=60.0) for _ in range(10))
    life = with_one_missing()
    crashes = [kill_newest_member(life, "b", after_s=60.0, is_crash=True) for _ in range(2)]
    assert crashes[-1]


def break_device_of_newest_member(life: Life, node: str, after_s: float) -> list[Command]:
    """The replacement joins on this node, trains for some time, and its device breaks."""
    worker = newest(life)
    come(life, worker, node)
    while isinstance(life.core.state.phase, Running):
        life.wake()
    life.pause()
    life.form()
    life.now += after_s
    generation, step = life.core.state.generation, life.core.state.committed_step
    raised = WorkerRaised(worker, generation, "device", "CUDA error: uncorrectable ECC error", "")
    assert of(StopWorker, life.tell(raised))
    commands = life.tell(WorkerLost(worker, "exit code -9", node))
    survivors = [
        w for w in life.core.state.live.members() if w in life.core.state.membership.records
    ]
    commands += life.tell(*(Quiesced(w, generation, step) for w in survivors))
    life.form()
    return commands


def test_broken_devices_quarantine_a_node_also_after_long_useful_work() -> None:
    life = training("aab")
    life.lose("w2")
    life.form()
    life.core.state.quarantine.crashes = []
    told = [of(NodeQuarantined, break_device_of_newest_member(life, "b", 60.0)) for _ in range(3)]
    assert [bool(quarantined) for quarantined in told] == [False, False, True]
    assert "b" in life.core.state.quarantine.until


def test_a_device_that_breaks_under_a_worker_that_leaves_counts() -> None:
    life = training("aab", quarantine_after=1)
    life.tell(WorkerDraining("w2", "asked to"))
    generation = life.core.state.generation
    life.tell(WorkerRaised("w2", generation, "device", "CUDA error", ""))
    assert of(NodeQuarantined, life.tell(WorkerLost("w2", "exit code -9", "b")))


def test_kills_before_any_useful_work_quarantine_a_node() -> None:
    life = with_one_missing()
    assert [bool(kill_newest_member(life, "b", after_s=1.0)) for _ in range(2)] == [False, True]


def test_without_other_capacity_a_quarantined_node_is_used_again_after_doubling_pauses() -> None:
    life = with_one_missing(quarantine_patience_s=30.0)
    pauses = []
    for num_crashes in (2, 3, 3):
        for _ in range(num_crashes):
            quarantined_at = kill_newest_member(life, "b", after_s=1.0)
        assert quarantined_at
        while life.core.state.quarantine.until:
            commands = life.wake()
        pauses.append(life.now - quarantined_at)
        assert of(StartWorkers, commands)[-1].quarantined == ()
    assert [round(pause) for pause in pauses] == [30, 60, 120]


def test_a_quarantine_lasts_while_other_capacity_is_there() -> None:
    life = with_one_missing(quarantine_patience_s=30.0, standby_timeout_s=1e9)
    kill_newest_member(life, "b", after_s=1.0)
    quarantined_at = kill_newest_member(life, "b", after_s=1.0)
    come(life, newest(life), "a")
    life.pause()
    life.form()
    life.now = quarantined_at + 3000.0
    assert of(NodeReleased, life.tell(Woke())) == []
    assert "b" in life.core.state.quarantine.until


def test_two_bad_nodes_of_many_are_both_quarantined() -> None:
    life = training("aabbccddee", quarantine_after=3)
    for crash in range(3):
        for node in ("d", "e"):
            life.now += 5.0
            member = next(
                w
                for w in life.core.state.live.members()
                if life.core.state.membership.records[w].node == node
            )
            life.tell(WorkerLost(member, "exit code -11", node, is_crash=True))
            survivors = [
                w for w in life.core.state.live.members() if w in life.core.state.membership.records
            ]
            generation, step = life.core.state.generation, life.core.state.committed_step
            life.tell(*(Quiesced(w, generation, step) for w in survivors))
            life.form()
            joiner = newest(life)
            if crash < 2:
                come(life, joiner, node)
                while isinstance(life.core.state.phase, Running):
                    life.wake()
                life.pause()
                life.form()
    assert life.core.state.quarantine.until.keys() == {"d", "e"}
