"""The fleet on Ray: starts, their order with stops, and what a fleet does for pending workers."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from command_line import ROOT

from actors.ray_backend.actor_names import actor_names, find_actors
from actors.ray_backend.fleet import AGENT_DELAY_S, HEARTBEAT_S, RayFleet
from actors.runtime.factory import Factory
from actors.worker.worker_options import WorkerOptions
from elastic.protocol.commands import StartWorkers
from elastic.protocol.controller_state import ControllerState
from elastic.protocol.duty_records import WorkerRecord
from elastic.protocol.events import Event, WorkerLost
from pipelines.run.options import worker_options
from pipelines.settings import TrainSettings

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]
NOWHERE = {"num_cpus": 0, "resources": {"nowhere": 1}}
"""No node has this resource, so the workers stay pending."""
PATIENCE_S = 30.0


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    """A cluster whose processes can import this file."""
    paths = [str(Path(__file__).parent), str(ROOT), os.environ.get("PYTHONPATH", "")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(paths))
        ray.init("local", num_cpus=1, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


class FleetHost:
    """An actor that has a fleet, as the controller has."""

    def __init__(self, options: WorkerOptions, incarnation: int = 1) -> None:
        self._events: list[Event] = []
        factory, post = Factory("nothing:imported", {}), self._events.append
        self._fleet = RayFleet("run", factory, options, NOWHERE, 300.0, post, incarnation)

    def call(self, action: Callable[..., Any], *arguments: Any) -> Any:
        return action(self._fleet, self._events, *arguments)


def make_fleet(incarnation: int = 1) -> Callable[..., Any]:
    """A fleet in an actor of its own; the result calls a function with it and its events."""
    kind = ray.remote(num_cpus=0)(FleetHost)
    host = kind.remote(worker_options("/nowhere", TrainSettings()), incarnation)
    return lambda action, *arguments: ray.get(host.call.remote(action, *arguments))


def wait_for(condition: Callable[[], object], awaited: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"waited too long for {awaited}"
        time.sleep(0.05)


def workers(num: int) -> tuple[str, ...]:
    return tuple(f"w{i}" for i in range(num))


def start(fleet: RayFleet, events: list[Event], num: int) -> float:
    """Start workers; return for how long that holds up the caller."""
    began = time.monotonic()
    fleet.start_workers(StartWorkers(workers(num)))
    return time.monotonic() - began


def start_and_stop(fleet: RayFleet, events: list[Event], num: int) -> list[Event]:
    """Start workers, stop all at once, and wait for the events of their ends."""
    fleet.start_workers(StartWorkers(workers(num)))
    for worker in workers(num):
        fleet.stop_worker(worker)
    wait_for(lambda: len(events) == num, "all ends")
    time.sleep(0.5)
    return events


def start_and_close(fleet: RayFleet, events: list[Event], num: int) -> None:
    fleet.start_workers(StartWorkers(workers(num)))
    fleet.close()


def close(fleet: RayFleet, events: list[Event]) -> None:
    fleet.close()


def attach(fleet: RayFleet, events: list[Event], state: ControllerState) -> None:
    fleet.attach(state)


def test_a_hundred_starts_do_not_hold_up_the_controller() -> None:
    on_fleet = make_fleet()
    held_up_s = on_fleet(start, 100)
    wait_for(lambda: len(find_actors("run")) == 100, "all workers")
    print(f"100 starts hold up the caller for {1000 * held_up_s:.1f} ms")
    assert held_up_s < 0.05
    on_fleet(close)
    assert not find_actors("run")


def test_worker_that_is_stopped_before_its_start_is_made_is_lost_once() -> None:
    events = make_fleet()(start_and_stop, 50)
    assert sorted(event.worker for event in events if isinstance(event, WorkerLost)) == sorted(
        workers(50)
    )
    wait_for(lambda: not find_actors("run"), "the end of all")


def test_closed_fleet_starts_nothing_more() -> None:
    make_fleet()(start_and_close, 100)
    assert not find_actors("run")
    time.sleep(1.0)
    assert not find_actors("run")


def test_fleet_that_took_over_nothing_ends_the_pending_workers_of_a_dead_controller() -> None:
    on_first_fleet = make_fleet()
    on_first_fleet(start, 3)
    wait_for(lambda: len(find_actors("run")) == 3, "all workers")
    make_fleet(2)(close)
    assert not find_actors("run")


@pytest.mark.soak
def test_pending_workers_of_a_dead_controller_have_no_agent() -> None:
    """Their node is not known: an agent for the node "" was started every few seconds."""
    on_first_fleet = make_fleet()
    on_first_fleet(start, 2)
    wait_for(lambda: len(find_actors("run")) == 2, "all workers")
    state = ControllerState()
    state.membership.records = {worker: WorkerRecord(0.0) for worker in workers(2)}
    on_fleet = make_fleet(2)
    on_fleet(attach, state)
    deadline = time.monotonic() + AGENT_DELAY_S + 3 * HEARTBEAT_S
    while time.monotonic() < deadline:
        assert not [name for name in actor_names() if "agent" in name]
        time.sleep(0.1)
    on_fleet(close)
    assert not find_actors("run")
