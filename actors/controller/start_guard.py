"""The steps by which a shell opens a run or takes one over, guarded like its events.

Storage that does not answer is waited for: meanwhile workers that a dead controller has left are
greeted, and train. Any other exception is tried again, twice. What was raised is told to the core
only once its session has begun: until then its deadlines are of the time before the restart.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Set

from actors.controller.guard import PAUSE_S, describe
from actors.storage.errors import LeaseLost, RunRefused
from elastic.controller.controller_errors import MAX_IN_A_ROW
from elastic.protocol.controller_events import ControllerRaised, ControllerRecovered

STORAGE_PATIENCE_S = 150.0
"""Of a controller that comes back, which has a run to go on with. Less than the driver's for a
controller that does not."""
FIRST_PATIENCE_S = 15.0
"""Of one that begins: somebody waits for its answer."""
RETRY_EVERY_S = 1.0


class StartGuard:
    def __init__(self, url: str, patience_s: float, counted: Set[str]) -> None:
        """`counted` are the places at which exceptions are counted already."""
        self._url = url
        self._patience_s = patience_s
        self._counted = counted
        self.events: list[ControllerRaised | ControllerRecovered] = []
        """What the core is to be told, in order."""
        self.trouble = ""
        """What storage does not let happen at present, and why."""

    def attempt(self, place: str, step: Callable[[], object]) -> bool:
        """Do it; False if it was given up. Raises `LeaseLost`, and `RunRefused` if storage does
        not answer for too long."""
        num_errors, deadline = 0, time.monotonic() + self._patience_s
        while num_errors < MAX_IN_A_ROW:
            try:
                step()
            except LeaseLost:
                raise
            except OSError as error:
                if time.monotonic() >= deadline:
                    raise RunRefused(f"{self._url}: it cannot be opened ({error})") from error
                self.trouble = f"the start of the controller ({error})"
                time.sleep(RETRY_EVERY_S)
            except Exception as error:
                num_errors += 1
                self.events.append(describe(place, error))
                time.sleep(PAUSE_S * num_errors)
            else:
                self.trouble = ""
                if num_errors or place in self._counted:
                    self.events.append(ControllerRecovered(place))
                return True
        return False
