"""Guard for the steps by which a shell opens a run or takes one over.

If storage does not answer, the guard waits for it. Meanwhile the survivors of a dead controller are
greeted and go on training. On any other exception the guard retries a step twice. The core learns
of exceptions only once its session has begun: until then its deadlines are of the time before the
restart.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Set

from actors.controller.guard import PAUSE_S, describe
from actors.storage.errors import LeaseLost, RunRefused
from elastic.controller.controller_errors import MAX_IN_A_ROW
from elastic.protocol.controller_events import ControllerRaised, ControllerRecovered

STORAGE_PATIENCE_S = 150.0
"""How long a restarted controller waits for storage, unless its run is detached. Less than the
driver waits for a controller that does not come back."""
FIRST_PATIENCE_S = 15.0
"""How long a first controller waits for storage: the user waits for its answer."""
RETRY_EVERY_S = 1.0


class StartGuard:
    def __init__(
        self,
        url: str,
        patience_s: float,
        counted: Set[str],
        sleep: Callable[[float], None] = time.sleep,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """`counted` are the places that have a count of exceptions already."""
        self._sleep, self._monotonic = sleep, monotonic
        self._url = url
        self._patience_s = patience_s
        self._counted = counted
        self.events: list[ControllerRaised | ControllerRecovered] = []
        """The events to post to the core, in order."""
        self.trouble = ""
        """What currently waits for storage, and why; empty if nothing does."""

    def attempt(self, place: str, step: Callable[[], object]) -> bool:
        """Run a step, with retries; return False if it was given up. Raises `LeaseLost`, and
        `RunRefused` if storage does not answer for too long."""
        num_errors, deadline = 0, self._monotonic() + self._patience_s
        while num_errors < MAX_IN_A_ROW:
            try:
                step()
            except LeaseLost:
                raise
            except OSError as error:
                if self._monotonic() >= deadline:
                    raise RunRefused(
                        f"{self._url}: the run cannot be opened, storage does not answer ({error})"
                    ) from error
                self.trouble = f"the start of the controller ({error})"
                self._sleep(RETRY_EVERY_S)
            except Exception as error:
                num_errors += 1
                self.events.append(describe(place, error))
                self._sleep(PAUSE_S * num_errors)
            else:
                self.trouble = ""
                if num_errors or place in self._counted:
                    self.events.append(ControllerRecovered(place))
                return True
        return False
