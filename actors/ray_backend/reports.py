"""A worker's reports to the controller, in order; those of quick steps are sent together."""

from __future__ import annotations

import threading
import time
from math import inf
from typing import Any

from elastic.protocol.commands import Order
from elastic.protocol.events import ComputeTimed, Event, StepCommitted
from elastic.replay.reattachment import Outbox

STEPS_EVERY_S = 0.25
"""A message costs both sides a millisecond of a core. The controller is not on the path of a step,
and after a failure the survivors report the records that it does not have."""


class Reports:
    """Sends events to the controller, and again to one that has restarted. For any thread."""

    def __init__(self, controller: Any, incarnation: int) -> None:
        self._controller = controller
        self._outbox = Outbox(incarnation)
        self._lock = threading.Lock()
        self._pending: list[Event] = []
        self._is_pending = threading.Event()
        self._sent_s = -inf
        threading.Thread(target=self._serve, name="reports", daemon=True).start()

    def add(self, event: Event) -> None:
        """Send an event and all before it; a committed step may wait for `STEPS_EVERY_S`."""
        with self._lock:
            self._outbox.add(event)
            self._pending.append(event)
            is_step = isinstance(event, StepCommitted | ComputeTimed)
            if is_step and time.monotonic() - self._sent_s < STEPS_EVERY_S:
                self._is_pending.set()
            else:
                self._send()

    def note(self, incarnation: int, order: Order) -> None:
        """Note an order before the worker takes it; see `Outbox.note`."""
        with self._lock:
            self._outbox.note(incarnation, order)

    def repeat(self, incarnation: int, committed_step: int) -> None:
        """Send what a restarted controller, which knows the steps up to `committed_step`, may not
        have."""
        with self._lock:
            self._pending = self._outbox.events_to_repeat(incarnation, committed_step)
            self._send()

    def _send(self) -> None:
        if not self._pending:
            return
        events, self._pending = self._pending, []
        self._controller.report.remote(self._outbox.incarnation, *events)
        self._sent_s = time.monotonic()

    def _serve(self) -> None:
        while True:
            self._is_pending.wait()
            self._is_pending.clear()
            time.sleep(STEPS_EVERY_S)
            with self._lock:
                self._send()
