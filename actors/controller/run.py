"""The controller as a named Ray actor: the shell in a thread, and doors for workers and driver."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from actors.runtime.factory import Factory
from actors.worker.worker_options import WorkerOptions
from elastic.protocol.events import Event, RunOpened


@dataclass(frozen=True)
class RunSpec:
    """All that a controller needs to drive a run."""

    name: str
    folder: str
    opening: RunOpened
    program: Factory
    options: WorkerOptions
    draining_workers: tuple[tuple[int, Event], ...] = ()
    """What shall be posted once a step has committed: planned removals."""
    observers: tuple[Factory, ...] = ()
    resources: dict[str, Any] = field(default_factory=lambda: {"num_cpus": 1})
    """What each worker asks the cluster for, as options of its actor."""
    driver_timeout_s: float = 60.0
    orphan_timeout_s: float = 300.0
    detached: bool = False
    head_patience_s: float = 30.0
    """How long Ray's GCS may be away until the run is saved and ends."""
    sources: str = ""
    """The digest of the driver's, which the controller's must equal."""
