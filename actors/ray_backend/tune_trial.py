"""A run as a trial of Ray Tune: what the run commits is what the trial reports."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from ray import tune

from actors.ray_backend.cluster.ray_private import ON_HEAD


class TrialRun(Protocol):
    """A run under way, as a trial sees it."""

    def next_report(self) -> dict[str, Any]:
        """Waits for the next; the last has `done`. Raises what the run has failed by."""

    def pause(self) -> dict[str, Any]:
        """What the run goes on from when it is begun again; it may end now."""

    def resume(self, paused: dict[str, Any]) -> None:
        """Go on from there. Raises ValueError if this run cannot."""

    def stop(self) -> None:
        """Save and end; returns when nothing of the run is left."""


Begin = Callable[[str, dict[str, Any]], TrialRun]
"""Makes a trial's run from the trial's name and its part of the parameter space."""


def trainable_of(begin: Begin, name: str) -> Any:
    """What `tune.Tuner` takes. The trial itself asks for no CPU, since its run's workers do; one
    that asks for nothing at all is refused by Tune."""

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
            if hasattr(self, "_run"):  # else it was refused
                self._run.stop()

    Trial.__name__ = name
    return tune.with_resources(Trial, {"CPU": 0, **ON_HEAD})
