"""`snapshot.every=auto`: the interval by cost, its measurement, and the controller's orders."""

from __future__ import annotations

import pytest
from test_draining import deliver, make_training_core, select
from users_policy import users_options

from actors.snapshots.snapshot_cost import MIN_SNAPSHOTS, SnapshotCost
from elastic.protocol.commands import StartSnapshots
from elastic.protocol.notes import Warned
from elastic.protocol.snapshot_events import SnapshotServerLost, SnapshotServerReady, SnapshotTimed
from elastic.reshard.snapshot_interval import AUTO_EVERY, MAX_EVERY, interval_for
from elastic.reshard.snapshot_placement import SnapshotServer
from pipelines.run.options import policy_of, worker_options
from pipelines.settings import SnapshotSettings, TrainSettings

START = 100.0


@pytest.mark.parametrize(
    ("share", "every", "expected"),
    [
        (0.0, 1, 1),
        (0.01, 1, 1),
        (0.011, 1, 2),
        (0.05, 1, 8),
        (0.08, 1, 8),
        (1e9, 1, MAX_EVERY),
        (0.05, 8, 8),
        (0.03, 8, 8),  # 4 would do, but not with a margin
        (0.02, 8, 4),
        (0.0, MAX_EVERY, 1),
    ],
)
def test_interval_is_the_least_power_of_two_that_the_cost_allows(
    share: float, every: int, expected: int
) -> None:
    assert interval_for(share, every) == expected


@pytest.mark.parametrize(
    ("num_steps", "every", "setting", "expected"),
    [
        (0.0, 1, 1, 1),
        (3.1, 1, 1, 4),
        (3.3, 1, 1, 8),  # with headroom
        (3.1, 3, 3, 6),  # a multiple of the setting
        (2.0, 3, 3, 3),
        (3.1, 4, 1, 4),
        (3.1, 8, 1, 8),  # 4 would do, but not with a margin
        (2.0, 8, 1, 4),
        (0.0, 8, 1, 1),
        (1e9, 3, 3, 3 * MAX_EVERY),
        (3.1, 1, AUTO_EVERY, 4),
        (0.0, 1, AUTO_EVERY, 2),  # by the share
    ],
)
def test_interval_is_long_enough_for_a_copy(
    num_steps: float, every: int, setting: int, expected: int
) -> None:
    assert interval_for(0.02, every, num_steps, setting) == expected


@pytest.mark.parametrize("every", [1, 4, 64])
def test_interval_is_stable_under_the_cost_that_led_to_it(every: int) -> None:
    for share in (k / 1000 for k in range(200)):
        chosen = interval_for(share, every)
        assert share / chosen <= 0.01 or chosen == MAX_EVERY
        assert interval_for(share, chosen) == chosen


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def run_steps(cost: SnapshotCost, clock: Clock, num_steps: int, every: int, added_s: float) -> None:
    """Steps of 1 s; a snapshot adds a part of its time when it begins, and the rest before the
    next vote."""
    for step in range(num_steps):
        cost.end_step()
        if step % every == 0:
            with cost.spending():
                clock.now_s += 0.25 * added_s
            cost.note_begun()
        clock.now_s += 1.0
        with cost.spending():
            clock.now_s += 0.75 * added_s * (step % every == 0)


@pytest.mark.parametrize("every", [1, 4])
def test_cost_is_relative_to_a_step_without_snapshot(every: int) -> None:
    clock = Clock()
    cost = SnapshotCost(clock)
    run_steps(cost, clock, MIN_SNAPSHOTS * every, every, 0.5)
    assert cost.share is None or every > 1, "too few snapshots are complete"
    run_steps(cost, clock, 8 * every, every, 0.5)
    assert cost.share == pytest.approx(0.5)
    cost.forget_snapshots()
    assert cost.share is None


def test_copy_takes_steps_only_if_a_vote_cannot_wait_for_it() -> None:
    clock = Clock()
    cost = SnapshotCost(clock)
    run_steps(cost, clock, 5, every=9, added_s=0.5)
    cost.note_copied(60.0)
    assert cost.num_steps(5.0) is None, "the first copy touches new memory"
    cost.note_copied(6.0)
    assert cost.num_steps(5.0) == 0.0
    assert cost.num_steps(4.0) == pytest.approx(6.0)
    cost.forget_snapshots()
    assert cost.num_steps(5.0) is None


def test_setting_auto_reaches_policy_and_workers() -> None:
    settings = TrainSettings(snapshot=SnapshotSettings(every="auto"))
    assert policy_of(settings, 1, 1, "run").snapshot_every == AUTO_EVERY
    assert worker_options("run", settings).snapshot_every == AUTO_EVERY
    assert users_options("run").snapshot_every == 1


def ready_servers(*nodes: str) -> list[SnapshotServerReady]:
    return [SnapshotServerReady(SnapshotServer(node, "", node, "host", 1)) for node in nodes]


def test_costliest_worker_decides_the_interval() -> None:
    core = make_training_core("abc", layout="fsdp=3", min_workers=3, snapshot_every=AUTO_EVERY)
    [first] = select(StartSnapshots, deliver(core, *ready_servers(*"abc"), now=START))
    assert first.every == 1
    generation, workers = core.state.generation, core.state.live.members()
    timed = [
        SnapshotTimed(w, generation, s) for w, s in zip(workers, (0.015, 0.03, 0.02), strict=True)
    ]
    orders = select(StartSnapshots, deliver(core, *timed, now=START))
    assert [order.every for order in orders] == [2, 4], "the third worker changes nothing"
    assert orders[-1].snapshot_servers == first.snapshot_servers
    digits = {order.num_changes % 3 for order in (first, *orders)}
    assert len(digits) == 3, "votes under different intervals do not count together"
    stale = SnapshotTimed(workers[0], generation - 1, 1.0)
    assert not select(StartSnapshots, deliver(core, stale, now=START))


def test_interval_changes_beside_a_lost_server() -> None:
    core = make_training_core("abc", layout="fsdp=3", min_workers=3, snapshot_every=AUTO_EVERY)
    deliver(core, *ready_servers(*"abc"), now=START)
    lost = SnapshotServerLost("a", "killed")
    timed = SnapshotTimed(core.state.live.members()[0], core.state.generation, 0.5)
    orders = select(StartSnapshots, deliver(core, lost, timed, now=START))
    assert [order.every for order in orders] == [1, 64]
    nodes = {server.node for order in orders for part in order.snapshot_servers for server in part}
    assert nodes == {"b", "c"}


def test_fixed_interval_ignores_costs() -> None:
    core = make_training_core("abc", layout="fsdp=3", min_workers=3, snapshot_every=3)
    [first] = select(StartSnapshots, deliver(core, *ready_servers(*"abc"), now=START))
    assert first.every == 0
    timed = SnapshotTimed(core.state.live.members()[0], core.state.generation, 0.5)
    assert not select(StartSnapshots, deliver(core, timed, now=START))


def test_slow_copies_lengthen_a_fixed_interval_with_a_warning() -> None:
    core = make_training_core("abc", layout="fsdp=3", min_workers=3, snapshot_every=3)
    [first] = select(StartSnapshots, deliver(core, *ready_servers(*"abc"), now=START))
    workers, generation = core.state.live.members(), core.state.generation
    slow = deliver(core, SnapshotTimed(workers[1], generation, 0.5, 10.0), now=START)
    [longer], [warning] = select(StartSnapshots, slow), select(Warned, slow)
    assert longer.every == 24 and longer.num_changes != first.num_changes
    assert warning.kind == "snapshot"
    assert warning.text == (
        f"a snapshot of {workers[1]} takes 10.0 steps: snapshots are taken every 24 steps, not "
        "every 3 as snapshot.every says"
    )
    faster = deliver(core, SnapshotTimed(workers[1], generation, 0.5, 0.0), now=START)
    [shorter] = select(StartSnapshots, faster)
    assert shorter.every == 0 and not select(Warned, faster)
