"""What silence becomes: by what the worker's node says of its process."""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator
from concurrent.futures import Future

import pytest
from users_policy import users_policy

from actors.controller import watch
from actors.controller.fleet import answered, missing
from actors.controller.watch import NODE_S, PROBE_S, Watch
from elastic.protocol.controller_events import WorkerAnswered, WorkersStalled
from elastic.protocol.events import (
    Event,
    Progressed,
    SnapshotServerReady,
    StateReady,
    StepCommitted,
    WorkerReady,
    WorkerSuspected,
)
from elastic.protocol.votes import StepRecord, Vote
from elastic.reshard.snapshot_placement import SnapshotServer

TIMEOUT_S = 2.5
USERS_TIMEOUT_S = users_policy().silence_timeout_s
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

    def probe_snapshot_server(self, node: str) -> Future[None]:
        return Future()


class BusyFleet(SilentFleet):
    """A worker that gets on with something: each answer has more signs of life."""

    def __init__(self) -> None:
        super().__init__(answered("runs"))
        self._num_signs = 0

    def probe(self, worker: str) -> Future[int]:
        self._num_signs += 1
        return answered(self._num_signs)


@pytest.fixture
def posted() -> Iterator[queue.Queue[Event]]:
    yield queue.Queue()


def suspicion(
    state: Future[str],
    posted: queue.Queue[Event],
    step_s: float | None = None,
    before_s: float = 0.0,
    others: tuple[Event, ...] = (),
) -> tuple[WorkerSuspected | None, float]:
    """What is posted within 7 s, and after how long."""
    watching = Watch(
        SilentFleet(state),  # type: ignore[arg-type]
        posted.put,
        silence_timeout_s=TIMEOUT_S,
        members=["w0"],
        step_s=before_s,
    )
    began = time.monotonic()
    try:
        watching.note(WorkerReady("w0", "node", 1))
        for other in others:
            watching.note(other)
        if step_s is not None:
            watching.note(committed(step_s))
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
    ],
)
def test_a_process_that_does_not_run_is_suspected_at_once(
    state: Future[str], cause: str, posted: queue.Queue[Event]
) -> None:
    event, took_s = suspicion(state, posted)
    assert event is not None and cause in event.cause
    assert FASTEST_S < took_s < SLOWEST_S


def committed(step_s: float | None = None) -> StepCommitted:
    record = StepRecord(0.0, 1, 1, 1, 1.0, 1, 0.1, 1.0, step_s, skipped=False)
    return StepCommitted(1, record, Vote(1, 1.0, 1, 1.0, 1))


def test_a_node_that_does_not_answer_is_waited_for_briefly(posted: queue.Queue[Event]) -> None:
    event, took_s = suspicion(Future(), posted)
    assert event is not None and "nor from its node" in event.cause
    assert FASTEST_S + NODE_S < took_s < SLOWEST_S + NODE_S


@pytest.mark.parametrize("state", ["runs", "may run"])
def test_a_process_that_runs_is_given_time(state: str, posted: queue.Queue[Event]) -> None:
    event, took_s = suspicion(answered(state), posted)
    assert event is not None and f"though its process {state}" in event.cause
    assert TIMEOUT_S < took_s < TIMEOUT_S + 1.5


GONE = missing("its agent has died")


@pytest.mark.parametrize("step_s", [None, 60.0])
def test_a_node_whose_agent_is_gone_says_nothing_of_a_worker(
    posted: queue.Queue[Event], step_s: float | None
) -> None:
    """The agent alone may have died: the worker may be in a call that holds the interpreter."""
    elsewhere = WorkerReady("w1", "another node", 1)
    event, took_s = suspicion(GONE, posted, step_s, others=(elsewhere,))
    if step_s is not None:
        assert event is None
        return
    assert event is not None and "though its process may run" in event.cause
    assert TIMEOUT_S < took_s < TIMEOUT_S + 1.5


@pytest.mark.parametrize(
    "other",
    [
        WorkerReady("w1", "node", 1),
        SnapshotServerReady(SnapshotServer("node", "", "socket", "host", 1)),
    ],
    ids=["another worker", "the snapshot server"],
)
def test_a_node_whose_agent_and_others_are_silent_is_lost_at_once(
    posted: queue.Queue[Event], other: Event
) -> None:
    event, took_s = suspicion(GONE, posted, others=(other,))
    assert event is not None and "nor from others on its node" in event.cause
    assert FASTEST_S < took_s < SLOWEST_S


def test_after_a_restart_of_the_controller_it_is_given_as_long_as_a_step_was(
    posted: queue.Queue[Event],
) -> None:
    event, _ = suspicion(answered("runs"), posted, before_s=60.0)
    assert event is None


@pytest.mark.parametrize("members", [["w1"], ["w0", "w1"]])
def test_a_commit_is_a_sign_of_life_of_members_only(
    posted: queue.Queue[Event], members: list[str]
) -> None:
    """A standby that stands still is noticed while the others train on."""
    watching = Watch(SilentFleet(answered("stopped")), posted.put, USERS_TIMEOUT_S)  # type: ignore[arg-type]
    began, suspected = time.monotonic(), []
    try:
        watching.note_members(members)
        watching.note(WorkerReady("w0", "node", 1))
        while not suspected and time.monotonic() - began < SLOWEST_S:
            watching.note(committed())
            time.sleep(0.05)
            suspected = [posted.get() for _ in range(posted.qsize())]
    finally:
        watching.close()
    assert bool(suspected) == ("w0" not in members)


NUM_MANY, PROBE_COSTS_S = 1000, 0.001


class CostlyFleet(BusyFleet):
    """Each question is a remote call, which takes its time until it is on its way."""

    def __init__(self) -> None:
        super().__init__()
        self.num_asked = 0

    def probe(self, worker: str) -> Future[int]:
        time.sleep(PROBE_COSTS_S)
        self.num_asked += 1
        return answered(self.num_asked)


def test_an_event_does_not_wait_until_a_thousand_workers_are_asked(
    posted: queue.Queue[Event],
) -> None:
    fleet, waits = CostlyFleet(), []
    watching = Watch(fleet, posted.put, USERS_TIMEOUT_S)  # type: ignore[arg-type]
    try:
        for number in range(NUM_MANY):
            watching.note(WorkerReady(f"w{number}", f"node{number // 8}", 1))
        deadline = time.monotonic() + 60.0
        while fleet.num_asked < NUM_MANY and time.monotonic() < deadline:
            began = time.monotonic()
            watching.note(committed())
            waits.append(time.monotonic() - began)
            time.sleep(0.001)
    finally:
        watching.close()
    assert fleet.num_asked >= NUM_MANY
    assert max(waits) < NUM_MANY * PROBE_COSTS_S / 4, "the lock is held while the fleet is asked"


def test_it_is_given_as_long_as_a_step(posted: queue.Queue[Event]) -> None:
    event, _ = suspicion(answered("runs"), posted, step_s=60.0)
    assert event is None


def test_signs_of_life_before_the_first_commit_are_of_the_generation_that_has_the_state(
    posted: queue.Queue[Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a recovery an evaluation, or data, may take longer than a hang."""
    monkeypatch.setattr(watch, "QUIET_S", 0.5)
    watching = Watch(BusyFleet(), posted.put, USERS_TIMEOUT_S)  # type: ignore[arg-type]
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
    watching = Watch(fleet, posted.put, USERS_TIMEOUT_S)  # type: ignore[arg-type]
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

    watching = Watch(HangingFleet(answered("runs")), posted.put, USERS_TIMEOUT_S, generation=7)  # type: ignore[arg-type]
    try:
        for worker in ("w0", "w1"):
            watching.note(WorkerReady(worker, "node", 1))
        while posted.get(timeout=8.0) != WorkersStalled(7, ("w1", "w0")):
            pass  # on a busy machine the probes may be late at first
        with pytest.raises(queue.Empty):
            posted.get(timeout=0.6)
    finally:
        watching.close()
