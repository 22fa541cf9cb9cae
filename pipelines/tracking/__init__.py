"""A run in MLflow: one process follows the run's files and delivers them; training never waits."""

from pipelines.tracking.tracker import Tracker

__all__ = ["Tracker"]
