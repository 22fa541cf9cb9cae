"""The observer of a run in its own process: tracker, metrics and notifier share one history."""

from __future__ import annotations

import time
from collections.abc import Iterable

from actors.ray_backend.metrics import Metric
from actors.storage.storage import open_storage
from pipelines.observe.history.run_folder import RunFolder
from pipelines.observe.sidecar.notify import Notifier
from pipelines.observe.sidecar.run_metrics import metrics_of
from pipelines.observe.tracking.tracker import Tracker

NOTICE_PATIENCE_S = 10.0


class Sidecar:
    """The tracker of a run and its notifier, if any, on one shared history.

    It is an `Observer`: it does not raise if storage, MLflow or the URL do not answer.
    """

    def __init__(self, tracker: Tracker, notifier: Notifier | None = None) -> None:
        self._tracker = tracker
        self._notifier = notifier

    def poll(self) -> None:
        self._tracker.poll()
        if self._notifier:
            self._notifier.look(self._tracker.history)

    def metrics(self) -> Iterable[Metric]:
        return metrics_of(self._tracker.history, time.time())

    def finish(self, patience_s: float) -> str | None:
        """Deliver the rest, notices first; return a line about what is undelivered, or None."""
        undelivered: list[str | None] = []
        self._tracker.follow()
        begun = time.monotonic()
        if self._notifier:
            undelivered.append(self._notifier.finish(self._tracker.history, NOTICE_PATIENCE_S))
        undelivered.append(self._tracker.finish(patience_s - (time.monotonic() - begun)))
        return "; ".join(line for line in undelivered if line) or None


def sidecar(
    run_folder: str,
    tracking_uri: str,
    experiment: str,
    notify_url: str | None = None,
    notify_after_s: float = 0.0,
) -> Sidecar:
    """Make the sidecar from plain values; this runs in the observer's process."""
    folder = RunFolder(open_storage(run_folder))
    notifier = Notifier(folder, notify_url, notify_after_s) if notify_url else None
    return Sidecar(Tracker(folder, tracking_uri, experiment), notifier)
