"""Observers as other processes make them: from names and plain values."""

from __future__ import annotations

from actors.storage import open_storage
from pipelines.run_folder import RunFolder
from pipelines.tracking import Tracker


def tracker(run_folder: str, tracking_uri: str, experiment: str) -> Tracker:
    """The MLflow tracker of one run."""
    return Tracker(RunFolder(open_storage(run_folder)), tracking_uri, experiment)
