"""Observers as other processes make them: from names and plain values."""

from __future__ import annotations

from pathlib import Path

from pipelines.run_folder import RunFolder
from pipelines.tracking import Tracker


def tracker(run_folder: str, tracking_uri: str, experiment: str) -> Tracker:
    """The MLflow tracker of one run."""
    return Tracker(RunFolder(Path(run_folder)), tracking_uri, experiment)
