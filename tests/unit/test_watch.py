"""What silence becomes: by what the worker's node says of its process."""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator
from concurrent.futures import Future

import pytest

from actors import watch
from actors.fleet import answered, missing
from actors.watch import NODE_S, PROBE_S, Watch
from elastic.controller_events import WorkerAnswered, WorkersStandStill
from elastic.events import (
    Event,
    Progressed,
    StateReady,
    StepCommitted,
    WorkerReady,
    WorkerSuspected,
)
from elastic.votes import StepRecord, Vote

TIMEOUT_S = 2.5
FASTEST_S, SLOWEST_S = PROBE_S, PROBE_S + 1.5
"""Of a look, and of a probe that is asked a second after the one before."""


class SilentFleet:
    """A worker that answers nothing, and a node that may."""

    def __init__(self, state: Future[str]) -> None:
        self._state = state

    def probe(self, worker: str) -> Future[int]:
        return Future()

    def process_state(self, worker: str) -> Future[str]:
        return self._state


@pytest.fixture
def posted() -> Iterator[queue.Queue[Event]]:
    yield queue.Queue()


def suspicion(
    state: Future[str], posted: queue.Queue[Event], step_s: float | None = None
) -> tuple[WorkerSuspected | None, float]:
    """What is posted within 7 s, and after how long."""
    watching = Watch(SilentFleet(state), posted.put, silence_timeout_s=TIMEOUT_S)  # type: ignore[arg-type]
    began = time.monotonic()
    try:
        watching.note(WorkerReady("w0", "node", 1))
        if step_s is not None:
            record = StepRecord(0.0, 1, 1, 1, 1.0, 1, 0.1, 1.0, step_s, skipped=False)
            watching.note(StepCommitted(1, record, Vote(1, 1.0, 1, 1.0, 1)))
        event = posted.get(timeout=4.5)
    except queue.Empty:
        return None, time.monotonic() - began
    finally:
        watching.close()
    assert isinstance(event, WorkerSuspected)
    return event, time.monotonic() - began


@pytest.mark.parametrize(
    ("state", "cause"),
    [
        (answered("stopped"), "and its process is stopped"),
        (answered("gone"), "and its process is gone"),
        (missing("its agent has died"), "nor from its node"),
    ],
)
def test_a_process_that_does_not_run_is_suspected_at_once(
    state: Future[str], cause: str, posted: queue.Queue[Event]
) -> None:
    event, took_s = suspicion(state, posted)
    assert event is not None and cause in event.cause
    assert FASTEST_S < took_s < SLOWEST_S


def test_a_node_that_does_not_answer_is_waited_for_briefly(posted: queue.Queue[Event]) -> None:
    event, took_s = suspicion(Future(), posted)
    assert event is not None and "nor from its node" in event.cause
    assert FASTEST_S + NODE_S < took_s < SLOWEST_S + NODE_S


@pytest.mark.parametrize("state", ["runs", "may run"])
def test_a_process_that_runs_is_given_time(state: str, posted: queue.Queue[Event]) -> None:
    event, took_s = suspicion(answered(state), posted)
    assert event is not None and f"though its process {state}" in event.cause
    assert TIMEOUT_S < took_s < TIMEOUT_S + 1.5


def test_it_is_given_as_long_as_a_step(posted: queue.Queue[Event]) -> None:
    event, _ = suspicion(answered("runs"), posted, step_s=60.0)
    assert event is None


class BusyFleet(SilentFleet):
    """A worker that gets on with something: each answer has more signs of life."""

    def __init__(self) -> None:
        super().__init__(answered("runs"))
        self._num_signs = 0

    def probe(self, worker: str) -> Future[int]:
        self._num_signs += 1
        return answered(self._num_signs)


def test_signs_of_life_before_the_first_commit_are_of_the_generation_that_has_the_state(
    posted: queue.Queue[Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a recovery an evaluation, or data, may take longer than a hang."""
    monkeypatch.setattr(watch, "QUIET_S", 0.5)
    watching = Watch(BusyFleet(), posted.put)  # type: ignore[arg-type]
    try:
        watching.note(WorkerReady("w0", "node", 1))
        watching.note(StateReady("w0", 7, 0, 0, 0.0, 1, 1, 2))
        assert posted.get(timeout=5.0) == Progressed(7)
    finally:
        watching.close()


def test_a_suspected_worker_that_answers_again_is_reported(posted: queue.Queue[Event]) -> None:
    class ThawingFleet(SilentFleet):
        def __init__(self) -> None:
            super().__init__(answered("stopped"))
            self.probes: list[Future[int]] = []

        def probe(self, worker: str) -> Future[int]:
            self.probes.append(Future())
            return self.probes[-1]

    fleet = ThawingFleet()
    watching = Watch(fleet, posted.put)  # type: ignore[arg-type]
    try:
        watching.note(WorkerReady("w0", "node", 1))
        assert isinstance(posted.get(timeout=5.0), WorkerSuspected)
        [probe] = fleet.probes
        probe.set_result(1)
        assert posted.get(timeout=5.0) == WorkerAnswered("w0")
    finally:
        watching.close()


def test_the_worker_that_came_to_a_standstill_first_is_named_first_and_once(
    posted: queue.Queue[Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The training thread of w1 stands still from the beginning, that of w0 a little later; both
    answer."""
    monkeypatch.setattr(watch, "QUIET_S", 1.5)

    class HangingFleet(SilentFleet):
        began = time.monotonic()

        def probe(self, worker: str) -> Future[int]:
            elapsed_s = min(1.3, time.monotonic() - self.began)
            return answered(1 if worker == "w1" else 1 + int(1000 * elapsed_s))

    watching = Watch(HangingFleet(answered("runs")), posted.put, generation=7)  # type: ignore[arg-type]
    try:
        for worker in ("w0", "w1"):
            watching.note(WorkerReady(worker, "node", 1))
        while posted.get(timeout=8.0) != WorkersStandStill(7, ("w1", "w0")):
            pass  # on a busy machine the probes may be late at first
        with pytest.raises(queue.Empty):
            posted.get(timeout=0.6)
    finally:
        watching.close()
