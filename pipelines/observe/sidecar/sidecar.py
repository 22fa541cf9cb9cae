"""What goes on beside a run, in one process that follows its files: tracking, figures, notices."""

from __future__ import annotations

import time
from collections.abc import Iterable

from actors.ray_backend.metrics import Metric
from actors.storage.storage import open_storage
from pipelines.observe.history.run_folder import RunFolder
from pipelines.observe.sidecar.notify import Notifier
from pipelines.observe.sidecar.run_metrics import figures_of
from pipelines.observe.tracking.tracker import Tracker

NOTICE_PATIENCE_S = 10.0


class Sidecar:
    """One run's tracker and, if there is one, its notifier; they share what has been read.

    It is an `Observer`: no storage, MLflow or URL that does not answer makes it raise.
    """

    def __init__(self, tracker: Tracker, notifier: Notifier | None = None) -> None:
        self._tracker = tracker
        self._notifier = notifier

    def poll(self) -> None:
        self._tracker.poll()
        if self._notifier:
            self._notifier.look(self._tracker.history)

    def figures(self) -> Iterable[Metric]:
        return figures_of(self._tracker.history, time.time())

    def finish(self, patience_s: float) -> str | None:
        """Notices first: who gets one is to know soon."""
        told: list[str | None] = []
        self._tracker.follow()
        begun = time.monotonic()
        if self._notifier:
            told.append(self._notifier.finish(self._tracker.history, NOTICE_PATIENCE_S))
        told.append(self._tracker.finish(patience_s - (time.monotonic() - begun)))
        return "; ".join(line for line in told if line) or None


def sidecar(
    run_folder: str,
    tracking_uri: str,
    experiment: str,
    notify_url: str | None = None,
    notify_after_s: float = 0.0,
) -> Sidecar:
    """Made in another process, from plain values."""
    folder = RunFolder(open_storage(run_folder))
    notifier = Notifier(folder, notify_url, notify_after_s) if notify_url else None
    return Sidecar(Tracker(folder, tracking_uri, experiment), notifier)
