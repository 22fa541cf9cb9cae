"""The part of a detached actor that ties its process to the run (invariant 12)."""

from __future__ import annotations

import threading
from typing import ClassVar

import ray

from actors.runtime.orphan_guard import OrphanGuard, end_process


class DetachedActor:
    """An actor that ends on request, and when it has not heard the run for `orphan_timeout_s`.

    Its methods run one at a time, but `live` has a thread of its own.
    """

    GROUPS: ClassVar = {"life": 1}

    def __init__(self, orphan_timeout_s: float) -> None:
        self._orphan_guard = OrphanGuard(orphan_timeout_s)

    def hear(self) -> None:
        """Note that the run goes on."""
        self._orphan_guard.hear()

    def end(self) -> None:
        """End the process as `ray.kill` does, but without Ray's GCS."""
        end_process()

    @ray.method(concurrency_group="life")
    def live(self) -> None:
        """Never return: the end of this call reports the end of the process."""
        threading.Event().wait()
