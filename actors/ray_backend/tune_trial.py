"""A run as a trial of Ray Tune: the trial reports the run's committed steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from ray import tune

from actors.ray_backend.cluster.ray_private import ON_HEAD


class TrialRun(Protocol):
    """A running run, as its trial uses it."""

    def next_report(self) -> dict[str, Any]:
        """Wait for the next report; the last one has `done`. Raises the error of a failed run."""

    def pause(self) -> dict[str, Any]:
        """Return the position from which the run resumes; the run may end now."""

    def resume(self, paused: dict[str, Any]) -> None:
        """Continue from a paused position. Raises ValueError if this run cannot."""

    def stop(self) -> None:
        """Save and end the run; return when nothing of it is left."""


Begin = Callable[[str, dict[str, Any]], TrialRun]
"""Starts a trial's run from the trial's name and its parameters."""


def trainable_of(begin: Begin, name: str) -> Any:
    """The trainable for `tune.Tuner`. The trial requests no CPU, since its run's workers do. Tune
    refuses a trial that requests nothing at all."""

    class Trial(tune.Trainable):  # type: ignore[misc]
        _run: TrialRun

        def setup(self, config: dict[str, Any]) -> None:
            self._run = begin(self.trial_name, config)

        def step(self) -> dict[str, Any]:
            return self._run.next_report()

        def save_checkpoint(self, checkpoint_dir: str) -> dict[str, Any]:
            return self._run.pause()

        def load_checkpoint(self, checkpoint: dict[str, Any] | None) -> None:
            self._run.resume(checkpoint or {})

        def cleanup(self) -> None:
            if hasattr(self, "_run"):  # else the run was refused
                self._run.stop()

    Trial.__name__ = name
    return tune.with_resources(Trial, {"CPU": 0, **ON_HEAD})
