"""What a node's watcher and Ray say of it reaches the core once, and Ray hears what it lacks."""

from __future__ import annotations

import time

import pytest

from actors.notices import Notice
from actors.ray_drains import Drains
from elastic.events import Event, NodeAtRisk, NodeDraining

SPOT = Notice("AWS spot interruption: terminate", 500.0)


class Told:
    """What the core, and Ray, have been told; and what Ray says."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.to_ray: list[tuple[str, str, float]] = []
        self.by_ray: dict[str, float] = {}
        self.ray_is_away = False
        self.drains = Drains(self.events.append, self._tell_ray, lambda: self.by_ray)

    def _tell_ray(self, node: str, cause: str, deadline: float) -> None:
        if self.ray_is_away:
            raise ConnectionError
        self.to_ray.append((node, cause, deadline))
        self.by_ray[node] = deadline


def test_a_notice_is_told_to_the_core_at_once_and_to_ray_at_the_next_beat() -> None:
    told = Told()
    told.drains.take("a", None)
    told.drains.take("a", SPOT)
    told.drains.take("a", SPOT)
    assert told.events == [NodeDraining("a", 500.0, SPOT.cause)]
    told.drains.exchange({"a", "b"})
    told.drains.exchange({"a", "b"})
    assert told.to_ray == [("a", SPOT.cause, 500.0)]
    assert len(told.events) == 1, "Ray says no more than it was told"


def test_ray_hears_it_later_if_it_is_away() -> None:
    told = Told()
    told.drains.take("a", SPOT)
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
    before = time.time()
    told.drains.exchange({"a"})
    told.drains.exchange({"a"})
    [event] = told.events
    assert isinstance(event, NodeDraining)
    assert event.deadline > before


def test_an_end_that_is_put_off_is_told_anew() -> None:
    told = Told()
    told.drains.take("a", SPOT)
    told.drains.take("a", Notice(SPOT.cause, 560.0))
    assert [event.deadline for event in told.events] == [500.0, 560.0]  # type: ignore[union-attr]


def test_a_risk_is_told_and_does_not_concern_ray() -> None:
    told = Told()
    told.drains.take("a", Notice("AWS rebalance recommendation"))
    told.drains.take("a", Notice("AWS rebalance recommendation"))
    told.drains.exchange({"a"})
    assert told.events == [NodeAtRisk("a", "AWS rebalance recommendation")]
    assert told.to_ray == []
    told.drains.take("a", SPOT)
    assert len(told.events) == 2
