"""Policy: the timeouts, limits and intervals by which the core decides."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True, slots=True)
class Policy:
    """The number of workers of a run, and all timeouts, limits and intervals of the core.

    No field has a default: `pipelines.run.options` takes each value from the run's settings, or
    from a constant of its duty. A field without a description of its own is a setting, which
    docs/settings.md describes.
    """

    min_workers: int
    max_workers: int

    # settings `growth`
    start_timeout_s: float
    growth_horizon_s: float
    standby_timeout_s: float
    gang_timeout_s: float
    growth_wait_s: float
    """How long a ready worker waits for others that are still warming up."""
    gang_pause_s: float
    """After a gang back-off, the run requests workers again after this time; it doubles, up to half
    an hour."""
    gang_jitter: float
    """The share by which this run waits longer than others before and after a gang back-off; from 0
    to 1, a hash of the run's name."""
    max_start_failures: int
    """The run fails if this many workers die while warming up and none was ever ready."""
    restart_backoff_s: float
    """The pause after a worker died while warming up; it doubles, up to a minute."""
    drain_grace_s: float
    """A node that still exists this long after its announced end is used again."""

    # settings `market`
    market_use: str
    on_demand_after_s: float
    retry_spot_after_s: float
    spot_price: float
    on_demand_price: float
    max_price_per_hour: float
    """Of all workers together; 0: any."""
    done_by_s: float
    """`market.done_by` as a time since the run's first start; 0: none."""
    done_by_at: float
    """The same as a time in seconds since the epoch; 0: none."""

    # settings `failure`
    silence_timeout_s: float
    hang_timeout_s: float
    hang_factor: float
    hang_share: float
    first_step_timeout_s: float
    quiesce_deadline_s: float
    quiesce_deadline_cuda_s: float
    quiesce_factor: float
    collective_timeout_s: float
    form_timeout_s: float
    form_timeout_per_worker_s: float
    form_factor: float
    reshard_timeout_s: float
    max_attempts: int
    records_timeout_s: float

    # settings `checkpoint`
    keep_last: int
    keep_every: int
    keep_best: int
    save_timeout_s: float
    save_backoff_s: float
    checkpoint_every_s: float
    """A checkpoint is due after this time, besides those due by steps; 0: never."""
    checkpoint_auto: bool
    """Whether `checkpoint.every` is `auto`: the time between checkpoints follows their measured
    cost and the observed failures, within the next two numbers."""
    checkpoint_least_s: float
    """The least time between checkpoints with `auto`."""
    checkpoint_most_s: float
    """The most time between checkpoints with `auto`."""

    # settings `snapshot`
    snapshot_every: int
    """In steps; 0: never; `AUTO_EVERY`: as often as the measured cost of a snapshot allows."""
    snapshot_redundancy: str
    snapshot_server_timeout_s: float
    snapshot_server_grace_s: float
    """How long a snapshot server has if the others hold a state as new as snapshots guarantee: a
    silent snapshot server may be gone with its machine."""

    # settings `loss_monitor` and `audit`
    max_skipped: int
    spike_factor: float
    spike_window: int
    audit_every: int
    audit_rollback: bool
    max_rollbacks: int
    """The most rollbacks before the run has got `loss_monitor.spike_window` steps further."""

    # settings `straggler`, `health` and `quarantine`
    straggler_every: int
    straggler_factor: float
    straggler_reports: int
    straggler_reduce: bool
    health_factor: float
    quarantine_after: int
    crash_window_s: float
    quarantine_s: float
    quarantine_patience_s: float


def unopened() -> Policy:
    """The policy of a core before `RunOpened`, which brings the run's: all numbers are 0."""
    zeros: dict[str, Any] = {"int": 0, "float": 0.0, "bool": False, "str": "copy"}
    return Policy(**{field.name: zeros[str(field.type)] for field in fields(Policy)})


MAX_DOUBLINGS = 16


def backoff_s(first_s: float, num_failures: int, longest_s: float) -> float:
    """The pause after a number of failures: `first_s`, doubled for each further failure, at most
    `longest_s`."""
    return min(first_s * 2.0 ** min(num_failures - 1, MAX_DOUBLINGS), longest_s)
