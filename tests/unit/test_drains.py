"""Notices of a node's watcher and of Ray reach the core once, and Ray learns of the watcher's."""

from __future__ import annotations

import pytest

from actors.controller.shell_parts import RunClock
from actors.notices import Notice, TimedNotice, with_time_left
from actors.ray_backend.cluster.node_drains import NO_DEADLINE_S, Drains
from elastic.protocol.events import Event, NodeAtRisk, NodeDraining

SPOT = Notice("AWS spot interruption: terminate", 500.0)
RISK = Notice("AWS rebalance recommendation")


class Exchange:
    """The events of the core, the drains that were sent to Ray, and the drains that Ray reports."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.sent_to_ray: list[tuple[str, str, float]] = []
        self.ray_drains: dict[str, float] = {}
        self.is_ray_away = False
        self.now = 380.0
        self.drains = Drains(
            self.events.append, self._send_to_ray, lambda: self.ray_drains, lambda: self.now
        )

    def with_time_left(self, notice: Notice | None, behind_s: float = 0.0) -> None:
        """The agent of node `a` reports; its clock is `behind_s` behind that of the controller."""
        self.drains.take("a", with_time_left(notice, lambda: self.now - behind_s))

    def _send_to_ray(self, node: str, cause: str, deadline: float) -> None:
        if self.is_ray_away:
            raise ConnectionError
        self.sent_to_ray.append((node, cause, deadline))
        self.ray_drains[node] = deadline


def test_notice_reaches_the_core_at_once_and_ray_at_the_next_exchange() -> None:
    exchange = Exchange()
    exchange.with_time_left(None)
    exchange.with_time_left(SPOT)
    exchange.with_time_left(SPOT)
    assert exchange.events == [NodeDraining("a", 500.0, SPOT.cause)]
    exchange.drains.exchange({"a", "b"})
    exchange.drains.exchange({"a", "b"})
    assert exchange.sent_to_ray == [("a", SPOT.cause, 500.0)]
    assert len(exchange.events) == 1, "Ray reports only the notice that it received"


def test_notice_reaches_ray_later_if_ray_is_unreachable() -> None:
    exchange = Exchange()
    exchange.with_time_left(SPOT)
    exchange.is_ray_away = True
    with pytest.raises(ConnectionError):
        exchange.drains.exchange({"a"})
    exchange.is_ray_away = False
    exchange.drains.exchange({"a"})
    assert exchange.sent_to_ray == [("a", SPOT.cause, 500.0)]


def test_drains_of_ray_count_only_for_nodes_of_the_run() -> None:
    exchange = Exchange()
    exchange.ray_drains = {"a": 700.0, "unknown": 700.0}
    exchange.drains.exchange({"a", "b"})
    exchange.drains.exchange({"a", "b"})
    assert exchange.events == [NodeDraining("a", 700.0, "Ray drains it")]
    assert exchange.sent_to_ray == []


def test_drain_of_ray_without_a_deadline_gets_a_default() -> None:
    exchange = Exchange()
    exchange.ray_drains = {"a": 0.0}
    exchange.drains.exchange({"a"})
    exchange.drains.exchange({"a"})
    [event] = exchange.events
    assert isinstance(event, NodeDraining)
    assert event.deadline == exchange.now + NO_DEADLINE_S


def test_postponed_deadline_is_reported_again() -> None:
    exchange = Exchange()
    exchange.with_time_left(SPOT)
    exchange.with_time_left(Notice(SPOT.cause, 560.0))
    assert [event.deadline for event in exchange.events] == [500.0, 560.0]  # type: ignore[union-attr]


def test_risk_reaches_the_core_but_not_ray() -> None:
    exchange = Exchange()
    exchange.with_time_left(RISK)
    exchange.with_time_left(RISK)
    exchange.drains.exchange({"a"})
    assert exchange.events == [NodeAtRisk("a", "AWS rebalance recommendation")]
    assert exchange.sent_to_ray == []
    exchange.with_time_left(SPOT)
    assert len(exchange.events) == 2


@pytest.mark.parametrize("behind_s", [-600.0, 0.0, 600.0])
def test_deadline_is_relative_to_the_clock_of_its_node(behind_s: float) -> None:
    """The clock of the node is right; that of the controller is ten minutes behind or ahead."""
    exchange, monotonic_s = Exchange(), 50.0
    clock = RunClock(0.0, lambda: exchange.now, lambda: monotonic_s)
    notice = Notice(SPOT.cause, exchange.now - behind_s + 120.0)
    exchange.with_time_left(notice, behind_s)
    [event] = map(clock.on_this_clock, exchange.events)
    assert isinstance(event, NodeDraining)
    assert event.deadline - clock.now() == pytest.approx(120.0)
    exchange.drains.exchange({"a"})
    [(_, _, deadline)] = exchange.sent_to_ray
    assert deadline - exchange.now == pytest.approx(120.0), (
        "the head node of Ray has the clock of the controller"
    )


def test_notice_seen_again_later_is_not_reported_again() -> None:
    """The second answer of the agent took longer to arrive."""
    exchange = Exchange()
    exchange.with_time_left(SPOT)
    exchange.now += 2.0
    late_notice = with_time_left(SPOT, lambda: exchange.now)
    exchange.now += 1.5
    exchange.drains.take("a", late_notice)
    exchange.drains.exchange({"a"})
    assert exchange.events == [NodeDraining("a", 500.0, SPOT.cause)]


def test_seen_notice_contains_the_time_left_by_the_clock_of_the_node() -> None:
    assert with_time_left(SPOT, lambda: 470.0) == TimedNotice(SPOT, 30.0)
    assert with_time_left(RISK) == TimedNotice(RISK, None)
    assert with_time_left(None) is None
