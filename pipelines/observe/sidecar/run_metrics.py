"""The metrics of a run for Prometheus, exported through Ray; see docs/status.md."""

from __future__ import annotations

from collections.abc import Iterator

from actors.ray_backend.metrics import Metric
from elastic.protocol.votes import SPLIT
from pipelines.observe.history.history import History


def metrics_of(history: History, now: float) -> Iterator[Metric]:
    """The metrics as of `now` (seconds since the epoch); fractions from 0 to 1, times in seconds.

    A metric without a value, such as the loss before the first step, is None.
    """
    membership, progress = history.membership, history.progress
    if not membership.sessions:
        return
    is_stopped = membership.outcome is not None
    until = None if is_stopped else now
    begun = membership.sessions[-1].start
    split = history.account.split(until)
    last_step = max(begun, progress.time)
    checkpoint = membership.last("checkpoint")
    waiting_since = membership.waiting_since
    yield Metric("elastic_step", progress.step)
    yield Metric("elastic_loss", progress.loss)
    yield Metric("elastic_steps_per_s", progress.steps_per_s)
    for unit in ("tokens", "samples"):
        is_counted = progress.unit == unit
        yield Metric(f"elastic_{unit}_per_s", progress.tokens_per_s if is_counted else None)
    yield from _step_time_metrics(history)
    yield Metric("elastic_generation", membership.generation)
    yield Metric("elastic_workers", len(membership.members))
    yield Metric("elastic_workers_spare", len(membership.standbys))
    yield Metric("elastic_workers_starting", len(membership.starting))
    yield Metric("elastic_workers_wanted", membership.max_workers)
    yield Metric("elastic_workers_lost", membership.num_lost)
    yield Metric("elastic_goodput", split.goodput)
    yield Metric("elastic_compute_s", split.compute_s)
    yield Metric("elastic_redone_s", split.redone_s)
    yield Metric("elastic_paused_s", split.paused_s)
    yield Metric("elastic_waiting_s", split.waiting_s)
    yield Metric("elastic_waits_for_s", now - waiting_since if waiting_since else 0.0)
    yield Metric("elastic_since_step_s", 0.0 if is_stopped else now - last_step)
    saved_at = max(begun, checkpoint.time if checkpoint else 0.0)
    yield Metric("elastic_since_checkpoint_s", 0.0 if is_stopped else now - saved_at)
    for place, spent_s in history.account.workers.by_place(until).items():
        yield Metric("elastic_worker_s", spent_s, place)


def _step_time_metrics(history: History) -> Iterator[Metric]:
    """The sums of the run's step time by part, the recent speed of a device, and peak memory."""
    account = history.step_time
    for name in SPLIT:
        spent_s = getattr(account.run, name)
        yield Metric("elastic_step_time_s", spent_s, name.removesuffix("_s"))
    speed = account.device.speed(account.recent)
    yield Metric("elastic_device_tflops", speed["tflops"])
    yield Metric("elastic_device_mfu", speed["mfu"])
    members = set(history.membership.members)
    for worker, peak_bytes in history.peak_bytes.items():
        value = peak_bytes if worker in members else None
        yield Metric("elastic_peak_memory_bytes", value, worker)
