"""Specification of a run: all that a controller needs to drive it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from actors.runtime.factory import Factory
from actors.worker.worker_options import WorkerOptions
from elastic.protocol.events import Event, RunOpened


@dataclass(frozen=True)
class RunSpec:
    """A run to drive; the driver sends it to the controller."""

    name: str
    folder: str
    opening: RunOpened
    program: Factory
    options: WorkerOptions
    driver_timeout_s: float
    orphan_timeout_s: float
    draining_workers: tuple[tuple[int, Event], ...] = ()
    """Events to post once their step has committed: planned removals."""
    observers: tuple[Factory, ...] = ()
    resources: dict[str, Any] = field(default_factory=lambda: {"num_cpus": 1})
    """The resources that each worker requests, as options of its Ray actor."""
    detached: bool = False
    head_patience_s: float = 30.0
    """How long Ray's GCS may be unreachable before the run is saved and ends."""
    sources: str = ""
    """The digest of the driver's sources; the controller's must equal it."""
