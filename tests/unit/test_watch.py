"""The watch suspects silent workers, after a delay that depends on the report of their node."""

from __future__ import annotations

import gc
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
    StateReady,
    StepCommitted,
    WorkerReady,
    WorkerSuspected,
)
from elastic.protocol.snapshot_events import SnapshotServerReady
from elastic.protocol.votes import StepRecord, Vote
from elastic.reshard.snapshot_placement import SnapshotServer

TIMEOUT_S = 2.5
USERS_TIMEOUT_S = users_policy().silence_timeout_s
FASTEST_S, SLOWEST_S = PROBE_S, PROBE_S + 1.5
"""The shortest and longest delay of a suspicion: probes are sent one second apart."""


class SilentFleet:
    """A worker that answers no probe, and a node that may answer."""

    def __init__(self, state: Future[str]) -> None:
        self._state = state

    def probe(self, worker: str) -> Future[int]:
        return Future()

    def process_state(self, worker: str) -> Future[str]:
        return self._state

    def probe_snapshot_server(self, node: str) -> Future[None]:
        return Future()


class BusyFleet(SilentFleet):
    """A worker that makes progress: each answer has more signs of life."""

    def __init__(self) -> None:
        super().__init__(answered("runs"))
        self._num_signs = 0

    def probe(self, worker: str) -> Future[int]:
        self._num_signs += 1
        return answered(self._num_signs)


@pytest.fixture
def posted() -> Iterator[queue.Queue[Event]]:
    yield queue.Queue()


def wait_for_suspicion(
    state: Future[str],
    posted: queue.Queue[Event],
    step_s: float | None = None,
    last_step_s: float = 0.0,
    others: tuple[Event, ...] = (),
) -> tuple[WorkerSuspected | None, float]:
    """The suspicion that is posted within 4.5 s, if any, and the seconds until then."""
    watching = Watch(
        SilentFleet(state),  # type: ignore[arg-type]
        posted.put,
        silence_timeout_s=TIMEOUT_S,
        members=["w0"],
        step_s=last_step_s,
    )
    started = time.monotonic()
    try:
        watching.note(WorkerReady("w0", "node", 1))
        for other in others:
            watching.note(other)
        if step_s is not None:
            watching.note(commit_event(step_s))
        event = posted.get(timeout=4.5)
    except queue.Empty:
        return None, time.monotonic() - started
    finally:
        watching.close()
    assert isinstance(event, WorkerSuspected)
    return event, time.monotonic() - started


@pytest.mark.parametrize(
    ("state", "cause"),
    [
        (answered("stopped"), "and its process is stopped"),
        (answered("gone"), "and its process is gone"),
    ],
)
def test_process_that_does_not_run_is_suspected_at_once(
    state: Future[str], cause: str, posted: queue.Queue[Event]
) -> None:
    event, took_s = wait_for_suspicion(state, posted)
    assert event is not None and cause in event.cause
    assert FASTEST_S < took_s < SLOWEST_S


def commit_event(step_s: float | None = None) -> StepCommitted:
    record = StepRecord(0.0, 1, 1, 1, 1.0, 1, 0.1, 1.0, step_s, skipped=False)
    return StepCommitted(1, record, Vote(1, 1.0, 1, 1.0, 1))


def test_watch_waits_briefly_for_a_silent_node(posted: queue.Queue[Event]) -> None:
    event, took_s = wait_for_suspicion(Future(), posted)
    assert event is not None and "nor from its node" in event.cause
    assert FASTEST_S + NODE_S < took_s < SLOWEST_S + NODE_S


@pytest.mark.parametrize("state", ["runs", "may run"])
def test_running_process_gets_the_silence_timeout(state: str, posted: queue.Queue[Event]) -> None:
    event, took_s = wait_for_suspicion(answered(state), posted)
    assert event is not None and f"though its process {state}" in event.cause
    assert TIMEOUT_S < took_s < TIMEOUT_S + 1.5


GONE = missing("its agent has died")


@pytest.mark.parametrize("step_s", [None, 60.0])
def test_worker_whose_agent_is_lost_gets_the_silence_timeout(
    posted: queue.Queue[Event], step_s: float | None
) -> None:
    """Only the agent may have died; the worker may be in a call that holds the interpreter."""
    elsewhere = WorkerReady("w1", "another node", 1)
    event, took_s = wait_for_suspicion(GONE, posted, step_s, others=(elsewhere,))
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
def test_node_with_silent_agent_and_processes_is_suspected_at_once(
    posted: queue.Queue[Event], other: Event
) -> None:
    event, took_s = wait_for_suspicion(GONE, posted, others=(other,))
    assert event is not None and "nor from others on its node" in event.cause
    assert FASTEST_S < took_s < SLOWEST_S


def test_worker_gets_the_last_step_time_after_a_restart_of_the_controller(
    posted: queue.Queue[Event],
) -> None:
    event, _ = wait_for_suspicion(answered("runs"), posted, last_step_s=60.0)
    assert event is None


@pytest.mark.parametrize("members", [["w1"], ["w0", "w1"]])
def test_commit_is_a_sign_of_life_of_members_only(
    posted: queue.Queue[Event], members: list[str]
) -> None:
    """A stalled standby worker is noticed while the members train on."""
    watching = Watch(SilentFleet(answered("stopped")), posted.put, USERS_TIMEOUT_S)  # type: ignore[arg-type]
    started, suspected = time.monotonic(), []
    try:
        watching.note_members(members)
        watching.note(WorkerReady("w0", "node", 1))
        while not suspected and time.monotonic() - started < SLOWEST_S:
            watching.note(commit_event())
            time.sleep(0.05)
            suspected = [posted.get() for _ in range(posted.qsize())]
    finally:
        watching.close()
    assert bool(suspected) == ("w0" not in members)


NUM_MANY, PROBE_COSTS_S = 1000, 0.001


class CostlyFleet(BusyFleet):
    """Each probe is a remote call that takes `PROBE_COSTS_S` to send."""

    def __init__(self) -> None:
        super().__init__()
        self.num_probes = 0

    def probe(self, worker: str) -> Future[int]:
        time.sleep(PROBE_COSTS_S)
        self.num_probes += 1
        return answered(self.num_probes)


def test_event_does_not_wait_until_1000_workers_are_probed(
    posted: queue.Queue[Event],
) -> None:
    fleet, waits = CostlyFleet(), []
    watching = Watch(fleet, posted.put, USERS_TIMEOUT_S)  # type: ignore[arg-type]
    gc.disable()  # a collection of what other tests have left takes longer than the bound
    try:
        for number in range(NUM_MANY):
            watching.note(WorkerReady(f"w{number}", f"node{number // 8}", 1))
        deadline = time.monotonic() + 60.0
        while fleet.num_probes < NUM_MANY and time.monotonic() < deadline:
            started = time.monotonic()
            watching.note(commit_event())
            waits.append(time.monotonic() - started)
            time.sleep(0.001)
    finally:
        gc.enable()
        watching.close()
    assert fleet.num_probes >= NUM_MANY
    assert max(waits) < NUM_MANY * PROBE_COSTS_S / 4, "the lock is held while the fleet is probed"


def test_silent_worker_gets_the_time_of_a_long_step(posted: queue.Queue[Event]) -> None:
    event, _ = wait_for_suspicion(answered("runs"), posted, step_s=60.0)
    assert event is None


def test_signs_of_life_before_the_first_commit_count_for_the_resharded_generation(
    posted: queue.Queue[Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a recovery an evaluation or the data may take longer than the hang timeout."""
    monkeypatch.setattr(watch, "QUIET_S", 0.5)
    watching = Watch(BusyFleet(), posted.put, USERS_TIMEOUT_S)  # type: ignore[arg-type]
    try:
        watching.note(WorkerReady("w0", "node", 1))
        watching.note(StateReady("w0", 7, 0, 0, 0.0, 1, 1, 2))
        assert posted.get(timeout=5.0) == Progressed(7)
    finally:
        watching.close()


def test_suspected_worker_that_answers_again_is_reported(posted: queue.Queue[Event]) -> None:
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


def test_stalled_workers_are_reported_once_in_order_of_their_stall(
    posted: queue.Queue[Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The training thread of w1 stalls from the start, that of w0 a little later; both workers
    answer."""
    monkeypatch.setattr(watch, "QUIET_S", 1.5)

    class HangingFleet(SilentFleet):
        started = time.monotonic()

        def probe(self, worker: str) -> Future[int]:
            elapsed_s = min(1.3, time.monotonic() - self.started)
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
