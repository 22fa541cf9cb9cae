"""What the control thread tells the training thread without waiting for it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from actors.runtime.substitute_thread import dismiss, who_works
from actors.storage.errors import Interrupted


@dataclass(frozen=True)
class SaveRequest:
    """That a step after `after_step` be saved, in a generation."""

    generation: int
    after_step: int


class Interruption:
    """Flags between two threads; each is one integer, written by one side.

    A training thread may be left behind where it is `leavable`: it never comes out of there but
    by `Interrupted`, so that the thread in its place need not fear it.
    """

    def __init__(self) -> None:
        self.aborted_generation = 0
        self.pause_requested_generation = 0
        self.save_request = SaveRequest(0, 0)
        self.running_generation = 0
        self.num_signs_of_life = 0
        self._leaving = threading.Lock()
        self._leavable: set[int] = set()
        self._left: dict[int, int] = {}
        """The threads, and who stood in for each."""

    def check(self) -> None:
        """Called by the training thread wherever it may stop. Raises `Interrupted`."""
        self._stop_if_left()
        self.num_signs_of_life += 1
        if self.running_generation <= self.aborted_generation:
            raise Interrupted(f"generation {self.running_generation} is being aborted")

    @property
    def is_pause_requested(self) -> bool:
        return self.pause_requested_generation >= self.running_generation

    def is_save_requested_by_vote(self, saved_step: int) -> bool:
        """Whether a checkpoint after `saved_step`, the last, is wished for."""
        target_layout = self.save_request
        return (
            target_layout.generation >= self.running_generation
            and target_layout.after_step >= saved_step
        )

    @contextmanager
    def leavable(self) -> Iterator[None]:
        """For calls that wait for others, and change nothing that outlives them."""
        me = threading.get_ident()
        self._leavable.add(me)
        try:
            yield
        finally:
            with self._leaving:
                self._leavable.discard(me)
            self._stop_if_left()

    def leave(self, thread: int) -> bool:
        """Leave a thread behind, and who stands in for it, if that does no harm where it stands."""
        with self._leaving:
            can_leave = thread in self._leavable - self._left.keys()
            if can_leave:
                self._left[thread] = who_works(thread)
        return can_leave

    def is_left(self) -> bool:
        """Whether the calling thread has been left behind."""
        me = threading.get_ident()
        return me in self._left or me in self._left.values()

    def forget(self) -> None:
        """The calling thread ends; another may get its number."""
        me = threading.get_ident()
        self._left.pop(me, None)
        dismiss(me)

    def _stop_if_left(self) -> None:
        if self.is_left():
            raise Interrupted("this thread has been left behind")
