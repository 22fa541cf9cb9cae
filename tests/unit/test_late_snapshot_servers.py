"""A snapshot server that is never ready: the others hold snapshots, and it is started again."""

from __future__ import annotations

from test_draining import START, commit, deliver, make_training_core, select, snapshot_nodes

from elastic.controller.core import Core
from elastic.duties.snapshots import START_FACTOR
from elastic.protocol.commands import (
    Command,
    StartSnapshots,
    StartSnapshotServer,
    StopSnapshotServer,
)
from elastic.protocol.controller_events import ControllerRestarted
from elastic.protocol.events import Event, Woke
from elastic.protocol.notes import Warned
from elastic.protocol.snapshot_events import SnapshotServerLost, SnapshotServerReady
from elastic.protocol.wire import decode, encode
from elastic.reshard.snapshot_placement import SnapshotServer

LIMIT_S = START_FACTOR * 10.0
"""With the default of `snapshot.server_timeout_s`."""


def ready(node: str) -> Event:
    return SnapshotServerReady(SnapshotServer(node, "", node, "host", 1))


def make_core_without_server_c() -> Core:
    """Three workers on three nodes; the server of node c does not become ready."""
    core = make_training_core("abc", layout="fsdp=3", min_workers=3, snapshot_every=1)
    assert core.state.snapshots.starting_since == dict.fromkeys("abc", START)
    assert not select(StartSnapshots, deliver(core, ready("a"), ready("b"), now=START + 1.0))
    return core


def wake(core: Core) -> tuple[float, list[Command]]:
    """Go on to the next deadline of the core; keep its workers from counting as hanging."""
    now = core.next_deadline()
    assert now is not None
    return now, deliver(core, Woke(), now=now)


def let_it_be_late(core: Core) -> tuple[float, list[Command]]:
    commit(core, core.state.committed_step + 1, START + LIMIT_S - 1.0)
    return wake(core)


def test_snapshots_go_to_the_other_servers_after_the_limit() -> None:
    core = make_core_without_server_c()
    now, commands = let_it_be_late(core)
    assert now == START + LIMIT_S
    [warned] = select(Warned, commands)
    assert warned.kind == "snapshot"
    assert warned.text.startswith("the snapshot server of node c is not ready after 120 s: ")
    assert [stop.node for stop in select(StopSnapshotServer, commands)] == ["c"]
    [order] = select(StartSnapshots, commands)
    assert snapshot_nodes(order) == [["a", "b"], ["b", "a"], ["a"]]
    assert not select(StartSnapshotServer, commands), "the other one still has to end"


def test_late_server_is_started_again_after_a_pause_and_used_when_it_is_ready() -> None:
    core = make_core_without_server_c()
    now, _ = let_it_be_late(core)
    assert not deliver(core, SnapshotServerLost("c", "its process died"), now=now + 0.5)
    again_at, commands = wake(core)
    assert again_at == now + core.state.policy.restart_backoff_s
    assert [start.node for start in select(StartSnapshotServer, commands)] == ["c"]
    [order] = select(StartSnapshots, deliver(core, ready("c"), now=again_at + 2.0))
    assert snapshot_nodes(order) == [["a", "b"], ["b", "c"], ["c", "a"]]
    assert not core.state.snapshots.late_starts


def test_server_that_is_late_again_is_not_awaited_and_not_reported_again() -> None:
    core = make_core_without_server_c()
    let_it_be_late(core)
    again_at, _ = wake(core)
    lost = SnapshotServerLost("b", "its process died")
    [without_b] = select(StartSnapshots, deliver(core, lost, now=again_at + 1.0))
    assert snapshot_nodes(without_b) == [["a"], ["a"], ["a"]]
    [with_b] = select(StartSnapshots, deliver(core, ready("b"), now=again_at + 2.0))
    assert snapshot_nodes(with_b) == [["a", "b"], ["b", "a"], ["a"]], "it does not wait for c"
    commit(core, core.state.committed_step + 1, again_at + LIMIT_S - 1.0)
    commands = deliver(core, Woke(), now=again_at + LIMIT_S)
    assert [stop.node for stop in select(StopSnapshotServer, commands)] == ["c"]
    assert not select(Warned, commands)


def test_limit_moves_by_the_time_without_a_controller() -> None:
    core = make_core_without_server_c()
    state = decode(type(core.state), encode(core.state, is_sparse=True))
    restarted, away_s = Core(state), 1000.0
    now = START + 2.0 + away_s
    deliver(restarted, ControllerRestarted(2, START + 2.0), now=now)
    assert restarted.state.snapshots.starting_since == {"c": START + away_s}
    commit(restarted, restarted.state.committed_step + 1, now + LIMIT_S - 10.0)
    commands = deliver(restarted, Woke(), now=START + away_s + LIMIT_S)
    assert [stop.node for stop in select(StopSnapshotServer, commands)] == ["c"]
