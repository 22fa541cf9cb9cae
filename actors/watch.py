"""Watching: every worker and keeper is asked for a sign of life, and silence becomes a suspicion.

A commit is as good as an answer from every member, since none happens without all of them.

A worker that does not answer for `PROBE_S` may only be busy: a call in C that holds the
interpreter's lock (a tokenizer, a garbage collection) silences every thread of its process. So its
node is asked what the process does. A worker whose process is stopped or gone is suspected at once:
2.5 s after its last sign of life at most. If its node does not answer either, it is 4 s. A worker
whose process runs, or of which nobody knows, gets `silence_timeout_s`, or a median step if that is
longer. The death of a process is reported by its closed connection and waits for none of this.

Where no training thread gets on any more, the order in which they came to a standstill is reported:
after a hang the first of them is the most likely to have caused it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Generic, TypeVar

from actors.fleet import Fleet
from actors.guard import ThreadGuard
from elastic.controller_events import WorkerAnswered, WorkersStandStill
from elastic.events import (
    Event,
    KeeperLost,
    KeeperReady,
    KeeperSuspected,
    Progressed,
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
KEEPER_PATIENCE_S = 5.0
"""A keeper serves nobody's training thread, and may be busy with a large snapshot."""
PAUSE_AFTER_ERROR_S = 2.0
QUIET_S = 10.0
"""After so long without a commit, signs of life are told to the core, or that there are none."""
NUM_STANDING_STILL = 16
"""So many are named."""


@dataclass
class _Question(Generic[T]):
    asked: float
    answer: Future[T]


@dataclass
class _Probe(_Question[int]):
    """A worker's; `state` is what its node has been asked since."""

    state: _Question[str] | None = None


class Watch:
    """Asks in its own thread; `note` tells it who is there and what has been heard."""

    def __init__(
        self,
        fleet: Fleet,
        post: Callable[[Event], None],
        generation: int = 0,
        silence_timeout_s: float = 5.0,
    ) -> None:
        """`generation` is the one that may be training already."""
        self._silence_timeout_s = silence_timeout_s
        self._recent_step_s: deque[float] = deque(maxlen=NUM_RECENT_STEPS)
        self._fleet = fleet
        self._post = post
        self._questions: dict[str, _Probe | None] = {}
        self._of_keepers: dict[str, _Question[None] | None] = {}
        self._signs: dict[str, int] = {}
        self._advanced_at: dict[str, float] = {}
        """When each worker's training thread was last seen to have got on."""
        self._told_standstill = WorkersStandStill(0, ())
        self._suspected: set[str] = set()
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
                    self._questions[event.worker] = None
                    self._advanced_at.setdefault(event.worker, time.monotonic())
                case WorkerLost():
                    self._questions.pop(event.worker, None)
                    self._signs.pop(event.worker, None)
                    self._advanced_at.pop(event.worker, None)
                    self._suspected.discard(event.worker)
                case KeeperReady():
                    self._of_keepers[event.keeper.node] = None
                case KeeperLost():
                    self._of_keepers.pop(event.node, None)
                case StateReady():
                    # Else signs of life would count for nothing up to its first commit, before
                    # which there may be an evaluation, or data to wait for.
                    self._generation = max(self._generation, event.generation)
                case StepCommitted():
                    self._last_commit = time.monotonic()
                    self._generation = event.generation
                    if event.record.step_s is not None:
                        self._recent_step_s.append(event.record.step_s)

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
        with self._lock:
            advanced = False
            for worker in list(self._questions):
                advanced |= self._look(worker, time.monotonic())
            for node in list(self._of_keepers):
                self._look_at_keeper(node, time.monotonic())
            self._tell_progress(advanced, time.monotonic())

    def _look(self, worker: str, now: float) -> bool:
        """Take the worker's answer or suspect it; ask anew. True if it got on meanwhile."""
        question, advanced = self._questions[worker], False
        if question is not None and not question.answer.done():
            silence_s = now - max(question.asked, self._last_commit)
            if silence_s > PROBE_S and worker not in self._suspected:
                cause = self._suspicion(worker, question, now, silence_s)
                if cause:
                    self._suspected.add(worker)
                    silence = f"no answer to a probe for {silence_s:.1f} s, {cause}"
                    self._post(WorkerSuspected(worker, silence))
            return False
        if question is not None and question.answer.exception() is None:
            signs = question.answer.result()
            advanced = signs > self._signs.get(worker, 0)
            if advanced and worker in self._signs:  # a first answer does not say since when
                self._advanced_at[worker] = now
            self._signs[worker] = signs
            if worker in self._suspected:
                self._suspected.discard(worker)
                self._post(WorkerAnswered(worker))
        if question is None or now - question.asked >= ASK_EVERY_S:
            self._questions[worker] = _Probe(now, self._fleet.probe(worker))
        return advanced

    def _suspicion(self, worker: str, probe: _Probe, now: float, silence_s: float) -> str:
        """Why a silent worker is taken for lost; empty while it is not."""
        asked = probe.state
        if asked is None or (asked.answer.done() and now - asked.asked >= ASK_EVERY_S):
            asked = probe.state = _Question(now, self._fleet.process_state(worker))
        if not asked.answer.done():
            return "nor from its node" if now - asked.asked > NODE_S else ""
        if asked.answer.exception() is not None:
            return "nor from its node"
        state = asked.answer.result()
        if state in ("stopped", "gone"):
            return f"and its process is {state}"
        recent = sorted(self._recent_step_s)
        median_step_s = recent[len(recent) // 2] if recent else 0.0
        is_over = silence_s > max(self._silence_timeout_s, median_step_s)
        return f"though its process {state}" if is_over else ""

    def _look_at_keeper(self, node: str, now: float) -> None:
        """A silent one is told of again and again: what it keeps may not be needed any more."""
        question = self._of_keepers[node]
        if question is not None and not question.answer.done():
            if now - question.asked > KEEPER_PATIENCE_S:
                silence = f"no answer to a probe in {KEEPER_PATIENCE_S:g} s"
                self._post(KeeperSuspected(node, silence))
                self._of_keepers[node] = _Question(now, question.answer)
        elif question is None or now - question.asked >= ASK_EVERY_S:
            self._of_keepers[node] = _Question(now, self._fleet.probe_keeper(node))

    def _tell_progress(self, advanced: bool, now: float) -> None:
        if advanced and now - max(self._last_commit, self._last_told) > QUIET_S:
            self._last_told = now
            self._post(Progressed(self._generation))
        elif self._advanced_at:
            self._tell_standstill(now)

    def _tell_standstill(self, now: float) -> None:
        """Once for each order, or waiting for days would fill the journal."""
        newest = max(self._last_commit, *self._advanced_at.values())
        order = sorted(self._advanced_at, key=lambda worker: (self._advanced_at[worker], worker))
        standstill = WorkersStandStill(self._generation, tuple(order[:NUM_STANDING_STILL]))
        if now - newest > QUIET_S and standstill != self._told_standstill:
            self._told_standstill = standstill
            self._post(standstill)
