"""Watching: every worker and keeper is asked for a sign of life, and silence becomes a suspicion.

A commit is as good as an answer from every member, since none happens without all of them. Of any
other worker it says nothing.

A worker that does not answer for `PROBE_S` may only be busy: a call in C that holds the
interpreter's lock (a tokenizer, a garbage collection) silences every thread of its process. So its
node is asked what the process does. A worker whose process is stopped or gone is suspected at once:
2.5 s after its last sign of life at most. If its node does not answer either, it is 4 s; also if
its node's agent is gone, and another process of ours on that node is silent, too. A worker whose
process runs, or of which nobody knows, gets `silence_timeout_s`, or a median step if that is
longer. The death of a process is reported by its closed connection and waits for none of this.

Where no training thread gets on any more, the order in which they came to a standstill is reported:
after a hang the first of them is the most likely to have caused it.

The fleet is asked outside the lock: a thousand questions take longer than an event may wait.
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
    SnapshotServerLost,
    SnapshotServerReady,
    SnapshotServerSuspected,
    StateReady,
    StepCommitted,
    WorkerLost,
    WorkerReady,
    WorkerSuspected,
)

T = TypeVar("T")
LOOK_EVERY_S = 0.25
ASK_EVERY_S = 1.0
PROBE_S = 1.0
"""Four workers and three importing joiners on two cores answer within 0.05 s (docs/facts.md)."""
NODE_S = 1.5
"""How long a node gets to say what a process does."""
NUM_RECENT_STEPS = 32
SNAPSHOT_SERVER_TIMEOUT_S = 5.0
"""A keeper serves nobody's training thread, and may be busy with a large snapshot."""
PAUSE_AFTER_ERROR_S = 2.0
QUIET_S = 10.0
"""After so long without a commit, signs of life are told to the core, or that there are none."""
NUM_REPORTED_STALLED = 16
"""So many are named."""


@dataclass
class _Question(Generic[T]):
    asked: float
    answer: Future[T]


@dataclass
class _Probe(_Question[int]):
    """A worker's; `state` is what its node has been asked since."""

    state: _Question[str] | None = None


@dataclass
class _Watched:
    """A worker, and the latest question to it."""

    node: str
    probe: _Probe | None = None
    num_signs: int = 0
    has_answered: bool = False
    advanced_at: float = 0.0
    """When its training thread was last seen to have got on."""
    is_suspected: bool = False


class Watch:
    """Asks in its own thread; `note` tells it who is there and what has been heard."""

    def __init__(
        self,
        fleet: Fleet,
        post: Callable[[Event], None],
        generation: int = 0,
        silence_timeout_s: float = 5.0,
        members: Iterable[str] = (),
        step_s: float = 0.0,
    ) -> None:
        """`generation` and its `members` may be training already; `step_s` is the median time of
        the steps so far, 0 if there are none."""
        self._silence_timeout_s = silence_timeout_s
        self._recent_step_s = deque([step_s] if step_s else [], maxlen=NUM_RECENT_STEPS)
        self._fleet = fleet
        self._post = post
        self._workers: dict[str, _Watched] = {}
        self._of_snapshot_servers: dict[str, _Question[None] | None] = {}
        self._reported_stall = WorkersStalled(0, ())
        self._members = frozenset(members)
        self._generation = generation
        self._last_commit = self._last_told = time.monotonic()
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
                    self._of_snapshot_servers[event.snapshot_server.node] = None
                case SnapshotServerLost():
                    self._of_snapshot_servers.pop(event.node, None)
                case StateReady():
                    # Else signs of life would count for nothing up to its first commit, before
                    # which there may be an evaluation, or data to wait for.
                    self._generation = max(self._generation, event.generation)
                case StepCommitted():
                    self._last_commit = time.monotonic()
                    self._generation = event.generation
                    if event.record.step_s is not None:
                        self._recent_step_s.append(event.record.step_s)

    def note_members(self, workers: Iterable[str]) -> None:
        """From now on these train."""
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
        """Take the answers that have come, ask anew, and judge who is silent."""
        now = time.monotonic()
        with self._lock:
            num_advanced = sum(self._take_answer(worker, now) for worker in self._workers)
            due = [w for w, watched in self._workers.items() if _is_due(watched.probe, now)]
            due_keepers = [node for node, q in self._of_snapshot_servers.items() if _is_due(q, now)]
            doubtful = [w for w in self._workers if self._is_doubtful(w, now)]
        self._ask(due, due_keepers)
        self._ask_states(doubtful)
        now = time.monotonic()
        with self._lock:
            for worker in doubtful:
                self._judge(worker, now)
            for node in self._of_snapshot_servers:
                self._judge_keeper(node, now)
            self._tell_progress(num_advanced > 0, now)

    def _take_answer(self, worker: str, now: float) -> bool:
        """True if the worker got on meanwhile."""
        watched = self._workers[worker]
        probe = watched.probe
        if probe is None or not probe.answer.done() or probe.answer.exception() is not None:
            return False
        signs, before = probe.answer.result(), watched.num_signs
        if signs > before and watched.has_answered:  # a first answer does not say since when
            watched.advanced_at = now
        watched.num_signs, watched.has_answered = signs, True
        if watched.is_suspected:
            watched.is_suspected = False
            self._post(WorkerAnswered(worker))
        return signs > before

    def _ask(self, workers: list[str], nodes: list[str]) -> None:
        probes = {w: _Probe(time.monotonic(), self._fleet.probe(w)) for w in workers}
        of_keepers = {
            n: _Question(time.monotonic(), self._fleet.probe_snapshot_server(n)) for n in nodes
        }
        with self._lock:  # meanwhile some may have been lost
            for worker in probes.keys() & self._workers.keys():
                self._workers[worker].probe = probes[worker]
            self._of_snapshot_servers.update(
                {n: of_keepers[n] for n in nodes if n in self._of_snapshot_servers}
            )

    def _ask_states(self, workers: list[str]) -> None:
        """Ask the nodes of silent workers what their processes do."""
        for worker in workers:
            with self._lock:
                watched = self._workers.get(worker)
            probe = watched.probe if watched else None
            if probe is None:
                continue
            asked, now = probe.state, time.monotonic()
            if asked is None or (asked.answer.done() and now - asked.asked >= ASK_EVERY_S):
                probe.state = _Question(now, self._fleet.process_state(worker))

    def _silence_s(self, worker: str, now: float) -> float:
        """For how long a worker has given no sign of life since it was asked for one."""
        probe = self._workers[worker].probe
        if probe is None or probe.answer.done():
            return 0.0
        heard = self._last_commit if worker in self._members else 0.0
        return now - max(probe.asked, heard)

    def _is_doubtful(self, worker: str, now: float) -> bool:
        return self._silence_s(worker, now) > PROBE_S and not self._workers[worker].is_suspected

    def _judge(self, worker: str, now: float) -> None:
        """Suspect a silent worker, if there is a cause."""
        watched = self._workers.get(worker)
        if watched is None or watched.probe is None or not self._is_doubtful(worker, now):
            return
        silence_s = self._silence_s(worker, now)
        if cause := self._suspicion(watched, watched.probe, now, silence_s):
            watched.is_suspected = True
            silence = f"no answer to a probe for {silence_s:.1f} s, {cause}"
            self._post(WorkerSuspected(worker, silence))

    def _suspicion(self, watched: _Watched, probe: _Probe, now: float, silence_s: float) -> str:
        """Why a silent worker is taken for lost; empty while it is not."""
        asked = probe.state
        if asked is None:
            return ""
        if not asked.answer.done():
            return "nor from its node" if now - asked.asked > NODE_S else ""
        is_agent_gone = asked.answer.exception() is not None
        if is_agent_gone and self._num_silent(watched.node, now) > 1:
            return "nor from others on its node"
        state = "may run" if is_agent_gone else asked.answer.result()
        if state in ("stopped", "gone"):
            return f"and its process is {state}"
        recent = sorted(self._recent_step_s)
        median_step_s = recent[len(recent) // 2] if recent else 0.0
        is_over = silence_s > max(self._silence_timeout_s, median_step_s)
        return f"though its process {state}" if is_over else ""

    def _num_silent(self, node: str, now: float) -> int:
        """How many of our processes there do not answer."""
        here = [worker for worker, watched in self._workers.items() if watched.node == node]
        snapshot_server = self._of_snapshot_servers.get(node)
        is_keeper_silent = (
            snapshot_server
            and not snapshot_server.answer.done()
            and now - snapshot_server.asked > PROBE_S
        )
        return bool(is_keeper_silent) + sum(self._silence_s(w, now) > PROBE_S for w in here)

    def _judge_keeper(self, node: str, now: float) -> None:
        """A silent one is told of again and again: what it keeps may not be needed any more."""
        question = self._of_snapshot_servers[node]
        if (
            question is None
            or question.answer.done()
            or now - question.asked <= SNAPSHOT_SERVER_TIMEOUT_S
        ):
            return
        silence = f"no answer to a probe in {SNAPSHOT_SERVER_TIMEOUT_S:g} s"
        self._post(SnapshotServerSuspected(node, silence))
        question.asked = now

    def _tell_progress(self, advanced: bool, now: float) -> None:
        if advanced and now - max(self._last_commit, self._last_told) > QUIET_S:
            self._last_told = now
            self._post(Progressed(self._generation))
        elif self._workers:
            self._report_stall(now)

    def _report_stall(self, now: float) -> None:
        """Once for each order, or waiting for days would fill the journal."""
        advanced_at = {worker: watched.advanced_at for worker, watched in self._workers.items()}
        newest = max(self._last_commit, *advanced_at.values())
        order = sorted(advanced_at, key=lambda worker: (advanced_at[worker], worker))
        standstill = WorkersStalled(self._generation, tuple(order[:NUM_REPORTED_STALLED]))
        if now - newest > QUIET_S and standstill != self._reported_stall:
            self._reported_stall = standstill
            self._post(standstill)


def _is_due(question: _Question[T] | None, now: float) -> bool:
    """Whether to ask, or to ask anew."""
    return question is None or (question.answer.done() and now - question.asked >= ASK_EVERY_S)
