"""Options of a worker process, fixed at its start, and the envelope of its commands."""

from __future__ import annotations

from dataclasses import dataclass, field

from actors.health.health_options import HealthOptions
from actors.runtime.fault_spec import Fault
from actors.runtime.handshake import new_secret
from actors.runtime.network import Network
from elastic.protocol.commands import Order


@dataclass(frozen=True)
class Envelope:
    """A command with the incarnation of the controller that sends it."""

    incarnation: int
    order: Order


@dataclass(frozen=True)
class WorkerOptions:
    """Options of one worker process.

    `pipelines.run.options` takes those without a default from the run's settings, which
    docs/settings.md describes.
    """

    run_folder: str
    """The URL or path of the run folder."""
    collective_timeout_s: float
    checkpoint_every: int
    """In steps; 0: no checkpoint is due by steps."""
    snapshot_every: int
    audit_every: int
    straggler_every: int
    network: Network
    health: HealthOptions = field(default_factory=HealthOptions)
    faults: tuple[Fault, ...] = ()
    profiled: tuple[int, int] | None = None
    """The first and the last step to trace; see `actors.worker.profiling`."""
    secret: bytes = field(default_factory=new_secret, repr=False)
    """The secret that only the processes of this run share; a restarted controller has it, too."""
    max_snapshot_bytes: int | None = None
    """The size of the whole state in a snapshot; a snapshot server allocates at most this for a
    worker."""
