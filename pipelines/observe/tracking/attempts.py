"""Retries with growing pauses for work that depends on an unreliable service."""

from __future__ import annotations

from collections.abc import Callable

from actors.storage.credentials import without_credentials
from pipelines.observe.history.formatting import shortened


class Attempts:
    """Runs a piece of work until it succeeds, with doubling pauses between failures.

    `failure` is the reason of the last failure in one line, or empty. `clock` returns seconds.
    """

    def __init__(self, clock: Callable[[], float], longest_pause_s: float = 30.0) -> None:
        self.failure = ""
        self.longest_pause_s = longest_pause_s
        self._clock = clock
        self._pause_s = 0.5
        self._not_before = float("-inf")

    def run(self, work: Callable[[], None]) -> bool:
        """Try once, unless the pause is not over; return whether the work was done."""
        if self._clock() < self._not_before:
            return False
        try:
            work()
        except Exception as error:
            # A store, its driver or the network may raise anything; the tracker must go on.
            self.failure = shortened(without_credentials(f"{error}"), 300) or repr(error)
            self._pause_s = min(2 * self._pause_s, self.longest_pause_s)
            self._not_before = self._clock() + self._pause_s
            return False
        self.reset()
        return True

    def reset(self) -> None:
        """Forget earlier failures, so that the next attempt needs no pause."""
        self.failure, self._pause_s, self._not_before = "", 0.5, float("-inf")
