"""Failure detector: it probes every worker and snapshot server, and suspects the silent ones.

A commit counts as an answer from every member, since it needs all of them. It says nothing about
any other worker.

A worker that does not answer for `PROBE_S` may only be busy: a C call that holds the GIL (a
tokenizer, a garbage collection) silences every thread of its process. So the watch queries its node
for the state of the process:

- If the process is stopped or gone, the worker is suspected at once, at most 2.5 s after its last
  sign of life.
- If the node does not answer either, it takes 4 s. The same holds if the node's agent is gone and
  another process of the run on that node is silent, too.
- If the process runs, or nothing is known of it, the worker gets `silence_timeout_s`, or a median
  step if that is longer.

The death of a process is reported by its closed connection and waits for none of this.

When no training thread makes progress any more, the watch reports the order in which they stalled:
after a hang, the first one most likely caused it.

The watch queries the fleet outside its lock: a thousand probes take longer than an event may wait.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Generic, TypeVar

from actors.controller.fleet import Fleet
from actors.controller.guard import ThreadGuard
from elastic.protocol.controller_events import WorkerAnswered, WorkersStalled
from elastic.protocol.events import (
    Event,
    Progressed,
    StateReady,
    StepCommitted,
    WorkerLost,
    WorkerReady,
    WorkerSuspected,
)
from elastic.protocol.snapshot_events import (
    SnapshotServerLost,
    SnapshotServerReady,
    SnapshotServerSuspected,
)

T = TypeVar("T")
LOOK_EVERY_S = 0.25
PROBE_EVERY_S = 1.0
PROBE_S = 1.0
"""Four workers and three importing joiners on two cores answer within 0.05 s (docs/facts.md)."""
NODE_S = 1.5
"""How long a node may take to report the state of a process."""
NUM_RECENT_STEPS = 32
SNAPSHOT_SERVER_TIMEOUT_S = 5.0
"""No training thread waits for a snapshot server, and it may be busy with a large snapshot."""
PAUSE_AFTER_ERROR_S = 2.0
QUIET_S = 10.0
"""After this long without a commit the core gets a report of progress or of a stall."""
NUM_REPORTED_STALLED = 16
"""The most workers that a report of a stall names."""


@dataclass
class _Query(Generic[T]):
    sent_at: float
    answer: Future[T]


@dataclass
class _Probe(_Query[int]):
    """A probe of a worker; `state` is the later query to its node, if there was one."""

    state: _Query[str] | None = None


@dataclass
class _Watched:
    """A worker and the latest probe of it."""

    node: str
    probe: _Probe | None = None
    num_signs: int = 0
    has_answered: bool = False
    advanced_at: float = 0.0
    """When its training thread last made progress, as far as probes show."""
    is_suspected: bool = False


class Watch:
    """Probes on its own thread; `note` gives it the events that it needs."""

    def __init__(
        self,
        fleet: Fleet,
        post: Callable[[Event], None],
        silence_timeout_s: float,
        generation: int = 0,
        members: Iterable[str] = (),
        step_s: float = 0.0,
    ) -> None:
        """`generation` and its `members` may be training already. `step_s` is the median time of
        the steps so far, 0 if there are none."""
        self._silence_timeout_s = silence_timeout_s
        self._recent_step_s = deque([step_s] if step_s else [], maxlen=NUM_RECENT_STEPS)
        self._fleet = fleet
        self._post = post
        self._workers: dict[str, _Watched] = {}
        self._server_queries: dict[str, _Query[None] | None] = {}
        self._reported_stall = WorkersStalled(0, ())
        self._members = frozenset(members)
        self._generation = generation
        self._last_commit = self._last_report = time.monotonic()
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="watch", daemon=True)
        self._thread.start()

    def note(self, event: Event) -> None:
        with self._lock:
            match event:
                case WorkerReady():
                    now = time.monotonic()
                    self._workers[event.worker] = _Watched(event.node, advanced_at=now)
                case WorkerLost():
                    self._workers.pop(event.worker, None)
                case SnapshotServerReady():
                    self._server_queries[event.snapshot_server.node] = None
                case SnapshotServerLost():
                    self._server_queries.pop(event.node, None)
                case StateReady():
                    # Else signs of life would not count until the first commit, before which there
                    # may be an evaluation, or a wait for data.
                    self._generation = max(self._generation, event.generation)
                case StepCommitted():
                    self._last_commit = time.monotonic()
                    self._generation = event.generation
                    if event.record.step_s is not None:
                        self._recent_step_s.append(event.record.step_s)

    def note_members(self, workers: Iterable[str]) -> None:
        """Note the workers that train from now on."""
        with self._lock:
            self._members = frozenset(workers)

    def close(self) -> None:
        self._closed.set()
        self._thread.join()

    def _serve(self) -> None:
        guard = ThreadGuard("watch", self._post)
        while not self._closed.wait(LOOK_EVERY_S):
            try:
                self._look_at_all()
            except Exception as error:
                guard.note_error(error)
                self._closed.wait(PAUSE_AFTER_ERROR_S)
            else:
                guard.note_success()

    def _look_at_all(self) -> None:
        """Take the answers, send new queries, and suspect silent workers."""
        now = time.monotonic()
        with self._lock:
            num_advanced = sum(self._take_answer(worker, now) for worker in self._workers)
            due = [w for w, watched in self._workers.items() if _is_due(watched.probe, now)]
            nodes = [node for node, query in self._server_queries.items() if _is_due(query, now)]
            silent = [w for w in self._workers if self._needs_state(w, now)]
        self._probe(due, nodes)
        self._query_states(silent)
        now = time.monotonic()
        with self._lock:
            for worker in silent:
                self._suspect_worker(worker, now)
            for node in self._server_queries:
                self._suspect_snapshot_server(node, now)
            self._report_progress(num_advanced > 0, now)

    def _take_answer(self, worker: str, now: float) -> bool:
        """Take a worker's answer, if it has come; return whether the worker made progress."""
        watched = self._workers[worker]
        probe = watched.probe
        if probe is None or not probe.answer.done() or probe.answer.exception() is not None:
            return False
        signs, before = probe.answer.result(), watched.num_signs
        if signs > before and watched.has_answered:  # a first answer shows no progress
            watched.advanced_at = now
        watched.num_signs, watched.has_answered = signs, True
        if watched.is_suspected:
            watched.is_suspected = False
            self._post(WorkerAnswered(worker))
        return signs > before

    def _probe(self, workers: list[str], nodes: list[str]) -> None:
        """Send probes to these workers, and to the snapshot servers of these nodes."""
        probes = {w: _Probe(time.monotonic(), self._fleet.probe(w)) for w in workers}
        queries = {n: _Query(time.monotonic(), self._fleet.probe_snapshot_server(n)) for n in nodes}
        with self._lock:  # some may have been lost meanwhile
            for worker in probes.keys() & self._workers.keys():
                self._workers[worker].probe = probes[worker]
            self._server_queries.update({n: queries[n] for n in nodes if n in self._server_queries})

    def _query_states(self, workers: list[str]) -> None:
        """Query the nodes of silent workers for the states of their processes."""
        for worker in workers:
            with self._lock:
                watched = self._workers.get(worker)
            probe = watched.probe if watched else None
            if probe is None:
                continue
            query, now = probe.state, time.monotonic()
            if query is None or (query.answer.done() and now - query.sent_at >= PROBE_EVERY_S):
                probe.state = _Query(now, self._fleet.process_state(worker))

    def _silence_s(self, worker: str, now: float) -> float:
        """For how long a worker has given no sign of life since its latest probe."""
        probe = self._workers[worker].probe
        if probe is None or probe.answer.done():
            return 0.0
        last_commit = self._last_commit if worker in self._members else 0.0
        return now - max(probe.sent_at, last_commit)

    def _needs_state(self, worker: str, now: float) -> bool:
        """Whether a worker is silent for so long that the state of its process counts."""
        return self._silence_s(worker, now) > PROBE_S and not self._workers[worker].is_suspected

    def _suspect_worker(self, worker: str, now: float) -> None:
        """Suspect a silent worker, if there is a cause."""
        watched = self._workers.get(worker)
        if watched is None or watched.probe is None or not self._needs_state(worker, now):
            return
        silence_s = self._silence_s(worker, now)
        if cause := self._find_cause(watched, watched.probe, now, silence_s):
            watched.is_suspected = True
            silence = f"no answer to a probe for {silence_s:.1f} s, {cause}"
            self._post(WorkerSuspected(worker, silence))

    def _find_cause(self, watched: _Watched, probe: _Probe, now: float, silence_s: float) -> str:
        """Why a silent worker is suspected; empty while it is not."""
        query = probe.state
        if query is None:
            return ""
        if not query.answer.done():
            return "nor from its node" if now - query.sent_at > NODE_S else ""
        is_agent_gone = query.answer.exception() is not None
        if is_agent_gone and self._num_silent(watched.node, now) > 1:
            return "nor from others on its node"
        state = "may run" if is_agent_gone else query.answer.result()
        if state in ("stopped", "gone"):
            return f"and its process is {state}"
        recent = sorted(self._recent_step_s)
        median_step_s = recent[len(recent) // 2] if recent else 0.0
        is_too_long = silence_s > max(self._silence_timeout_s, median_step_s)
        return f"though its process {state}" if is_too_long else ""

    def _num_silent(self, node: str, now: float) -> int:
        """The number of the run's processes on a node that do not answer."""
        here = [worker for worker, watched in self._workers.items() if watched.node == node]
        query = self._server_queries.get(node)
        is_server_silent = query and not query.answer.done() and now - query.sent_at > PROBE_S
        return bool(is_server_silent) + sum(self._silence_s(w, now) > PROBE_S for w in here)

    def _suspect_snapshot_server(self, node: str, now: float) -> None:
        """Suspect a silent snapshot server, again and again: the core may ignore a suspicion while
        it still needs the snapshots."""
        query = self._server_queries[node]
        if query is None or query.answer.done():
            return
        if now - query.sent_at <= SNAPSHOT_SERVER_TIMEOUT_S:
            return
        silence = f"no answer to a probe in {SNAPSHOT_SERVER_TIMEOUT_S:g} s"
        self._post(SnapshotServerSuspected(node, silence))
        query.sent_at = now

    def _report_progress(self, advanced: bool, now: float) -> None:
        """Report progress between commits, or a stall."""
        if advanced and now - max(self._last_commit, self._last_report) > QUIET_S:
            self._last_report = now
            self._post(Progressed(self._generation))
        elif self._workers:
            self._report_stall(now)

    def _report_stall(self, now: float) -> None:
        """Report each order once: else a wait of days would fill the journal."""
        advanced_at = {worker: watched.advanced_at for worker, watched in self._workers.items()}
        newest = max(self._last_commit, *advanced_at.values())
        order = sorted(advanced_at, key=lambda worker: (advanced_at[worker], worker))
        stall = WorkersStalled(self._generation, tuple(order[:NUM_REPORTED_STALLED]))
        if now - newest > QUIET_S and stall != self._reported_stall:
            self._reported_stall = stall
            self._post(stall)


def _is_due(query: _Query[T] | None, now: float) -> bool:
    """Whether to send a query, or another one."""
    return query is None or (query.answer.done() and now - query.sent_at >= PROBE_EVERY_S)
