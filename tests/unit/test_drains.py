"""What a node's watcher and Ray say of it reaches the core once, and Ray hears what it lacks."""

from __future__ import annotations

import pytest

from actors.controller.shell_parts import RunClock
from actors.notices import Notice, SeenNotice, see
from actors.ray_backend.cluster.node_drains import NO_DEADLINE_S, Drains
from elastic.protocol.events import Event, NodeAtRisk, NodeDraining

SPOT = Notice("AWS spot interruption: terminate", 500.0)
RISK = Notice("AWS rebalance recommendation")


class Told:
    """What the core, and Ray, have been told; and what Ray says."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.to_ray: list[tuple[str, str, float]] = []
        self.by_ray: dict[str, float] = {}
        self.ray_is_away = False
        self.now = 380.0
        self.drains = Drains(
            self.events.append, self._tell_ray, lambda: self.by_ray, lambda: self.now
        )

    def see(self, notice: Notice | None, behind_s: float = 0.0) -> None:
        """What the agent of node `a` says; its clock is so far behind the controller's."""
        self.drains.take("a", see(notice, lambda: self.now - behind_s))

    def _tell_ray(self, node: str, cause: str, deadline: float) -> None:
        if self.ray_is_away:
            raise ConnectionError
        self.to_ray.append((node, cause, deadline))
        self.by_ray[node] = deadline


def test_a_notice_is_told_to_the_core_at_once_and_to_ray_at_the_next_beat() -> None:
    told = Told()
    told.see(None)
    told.see(SPOT)
    told.see(SPOT)
    assert told.events == [NodeDraining("a", 500.0, SPOT.cause)]
    told.drains.exchange({"a", "b"})
    told.drains.exchange({"a", "b"})
    assert told.to_ray == [("a", SPOT.cause, 500.0)]
    assert len(told.events) == 1, "Ray says no more than it was told"


def test_ray_hears_it_later_if_it_is_away() -> None:
    told = Told()
    told.see(SPOT)
    told.ray_is_away = True
    with pytest.raises(ConnectionError):
        told.drains.exchange({"a"})
    told.ray_is_away = False
    told.drains.exchange({"a"})
    assert told.to_ray == [("a", SPOT.cause, 500.0)]


def test_what_ray_drains_matters_where_something_of_the_run_is() -> None:
    told = Told()
    told.by_ray = {"a": 700.0, "stranger": 700.0}
    told.drains.exchange({"a", "b"})
    told.drains.exchange({"a", "b"})
    assert told.events == [NodeDraining("a", 700.0, "Ray drains it")]
    assert told.to_ray == []


def test_ray_may_name_no_end() -> None:
    told = Told()
    told.by_ray = {"a": 0.0}
    told.drains.exchange({"a"})
    told.drains.exchange({"a"})
    [event] = told.events
    assert isinstance(event, NodeDraining)
    assert event.deadline == told.now + NO_DEADLINE_S


def test_an_end_that_is_put_off_is_told_anew() -> None:
    told = Told()
    told.see(SPOT)
    told.see(Notice(SPOT.cause, 560.0))
    assert [event.deadline for event in told.events] == [500.0, 560.0]  # type: ignore[union-attr]


def test_a_risk_is_told_and_does_not_concern_ray() -> None:
    told = Told()
    told.see(RISK)
    told.see(RISK)
    told.drains.exchange({"a"})
    assert told.events == [NodeAtRisk("a", "AWS rebalance recommendation")]
    assert told.to_ray == []
    told.see(SPOT)
    assert len(told.events) == 2


@pytest.mark.parametrize("behind_s", [-600.0, 0.0, 600.0])
def test_an_end_is_as_far_away_as_by_the_clock_of_its_node(behind_s: float) -> None:
    """The node's clock is right, and the controller's is ten minutes behind, or ahead."""
    told, monotonic_s = Told(), 50.0
    clock = RunClock(0.0, lambda: told.now, lambda: monotonic_s)
    notice = Notice(SPOT.cause, told.now - behind_s + 120.0)
    told.see(notice, behind_s)
    [event] = map(clock.on_this_clock, told.events)
    assert isinstance(event, NodeDraining)
    assert event.deadline - clock.now() == pytest.approx(120.0)
    told.drains.exchange({"a"})
    [(_, _, deadline)] = told.to_ray
    assert deadline - told.now == pytest.approx(120.0), "Ray's head has the controller's clock"


def test_a_notice_that_is_seen_again_later_is_the_same() -> None:
    """Its answer has been on the way for longer the second time."""
    told = Told()
    told.see(SPOT)
    told.now += 2.0
    late = see(SPOT, lambda: told.now)
    told.now += 1.5
    told.drains.take("a", late)
    told.drains.exchange({"a"})
    assert told.events == [NodeDraining("a", 500.0, SPOT.cause)]


def test_a_notice_says_how_much_time_is_left_where_it_is_seen() -> None:
    assert see(SPOT, lambda: 470.0) == SeenNotice(SPOT, 30.0)
    assert see(RISK) == SeenNotice(RISK, None)
    assert see(None) is None
