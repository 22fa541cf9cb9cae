"""Requests from the control thread to the training thread: abort, pause, save, abandon."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from actors.runtime.substitute_thread import forget_substitute, working_thread
from actors.storage.errors import Interrupted


@dataclass(frozen=True)
class SaveRequest:
    """A request to save a step after `after_step`, in a generation."""

    generation: int
    after_step: int


class Interruption:
    """Flags between the control thread and the training thread; one side alone writes each.

    A training thread that is blocked inside `abandonable` may be abandoned. It then leaves that
    block only by `Interrupted`, so it cannot interfere with the thread that replaces it.
    """

    def __init__(self) -> None:
        self.aborted_generation = 0
        self.pause_requested_generation = 0
        self.save_request = SaveRequest(0, 0)
        self.running_generation = 0
        self.num_signs_of_life = 0
        self._leaving = threading.Lock()
        self._abandonable: set[int] = set()
        self._left: dict[int, int] = {}
        """The abandoned threads; for each, the thread that worked for it."""

    def check(self) -> None:
        """Called by the training thread wherever it can stop. Raises `Interrupted`."""
        self._stop_if_abandoned()
        self.num_signs_of_life += 1
        if self.running_generation <= self.aborted_generation:
            raise Interrupted(f"generation {self.running_generation} is being aborted")

    @property
    def is_pause_requested(self) -> bool:
        return self.pause_requested_generation >= self.running_generation

    def is_save_requested_by_vote(self, saved_step: int) -> bool:
        """Whether a checkpoint after `saved_step`, the last saved step, is requested."""
        request = self.save_request
        return request.generation >= self.running_generation and request.after_step >= saved_step

    @contextmanager
    def abandonable(self) -> Iterator[None]:
        """For calls that wait for other workers, and change nothing that outlives the call."""
        me = threading.get_ident()
        self._abandonable.add(me)
        try:
            yield
        finally:
            with self._leaving:
                self._abandonable.discard(me)
            self._stop_if_abandoned()

    def abandon(self, thread: int) -> bool:
        """Abandon a thread and its substitute if that is safe; returns whether it was."""
        with self._leaving:
            can_leave = thread in self._abandonable - self._left.keys()
            if can_leave:
                self._left[thread] = working_thread(thread)
        return can_leave

    def is_abandoned(self) -> bool:
        """Whether the calling thread has been abandoned."""
        me = threading.get_ident()
        return me in self._left or me in self._left.values()

    def forget(self) -> None:
        """Called by a thread that ends: another thread may get its ident."""
        me = threading.get_ident()
        self._left.pop(me, None)
        forget_substitute(me)

    def _stop_if_abandoned(self) -> None:
        if self._left and self.is_abandoned():  # called for each sample
            raise Interrupted("this thread was abandoned")
