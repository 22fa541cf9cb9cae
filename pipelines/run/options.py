"""The controller policy and the worker options of a run, from its settings."""

from __future__ import annotations

import re
from hashlib import sha256

from actors.health.health_options import HealthOptions
from actors.runtime.fault_spec import Fault
from actors.runtime.network import Network
from actors.worker.worker_options import WorkerOptions
from elastic.controller.capacity.growth import JOIN_WAIT_S
from elastic.controller.drain import NODE_GRACE_S
from elastic.duties.checkpoints import MAX_AUTO_S, MIN_AUTO_S
from elastic.duties.gang_backoff import FIRST_PAUSE_S
from elastic.duties.membership import FIRST_BACKOFF_S, MAX_START_FAILURES
from elastic.duties.rollback import MAX_ROLLBACKS
from elastic.duties.snapshots import SERVER_GRACE_S
from elastic.protocol.policy import Policy
from pipelines.errors import UserError
from pipelines.settings import TrainSettings
from pipelines.settings.market import MarketSettings


def policy_of(settings: TrainSettings, min_workers: int, max_workers: int, run_name: str) -> Policy:
    """The only place that makes a policy: from settings, and from constants of duties. Raises
    `UserError` for a price that the smallest run exceeds."""
    _refuse_low_price(settings.market, min_workers)
    checkpoint, snapshot, quarantine = settings.checkpoint, settings.snapshot, settings.quarantine
    return Policy(
        min_workers=min_workers,
        max_workers=max_workers,
        start_timeout_s=settings.growth.start_timeout_s,
        growth_horizon_s=settings.growth.horizon_s,
        standby_timeout_s=settings.growth.standby_timeout_s,
        gang_timeout_s=settings.growth.gang_timeout_s,
        growth_wait_s=JOIN_WAIT_S,
        gang_pause_s=FIRST_PAUSE_S,
        gang_jitter=_fraction_of(run_name),
        max_start_failures=MAX_START_FAILURES,
        restart_backoff_s=FIRST_BACKOFF_S,
        drain_grace_s=NODE_GRACE_S,
        market_use=settings.market.use,
        **settings.market.model_dump(exclude={"use", "done_by"}),
        done_by_s=settings.market.done_by_s,
        done_by_at=settings.market.done_by_at,
        **settings.failure.model_dump(exclude={"driver_timeout_s", "orphan_timeout_s"}),
        keep_last=checkpoint.keep_last,
        keep_every=checkpoint.keep_every,
        keep_best=checkpoint.keep_best,
        save_timeout_s=checkpoint.save_timeout_s,
        save_backoff_s=checkpoint.save_backoff_s,
        checkpoint_every_s=checkpoint.every_s,
        checkpoint_auto=checkpoint.every == "auto",
        checkpoint_least_s=MIN_AUTO_S,
        checkpoint_most_s=MAX_AUTO_S,
        snapshot_every=snapshot.every_steps,
        snapshot_redundancy=snapshot.redundancy,
        snapshot_server_timeout_s=snapshot.server_timeout_s,
        snapshot_server_grace_s=SERVER_GRACE_S,
        max_skipped=settings.loss_monitor.max_skipped,
        spike_factor=settings.loss_monitor.spike_factor,
        spike_window=settings.loss_monitor.spike_window,
        audit_every=settings.audit.every,
        audit_rollback=settings.audit.rollback,
        max_rollbacks=MAX_ROLLBACKS,
        straggler_every=settings.straggler.every,
        straggler_factor=settings.straggler.factor,
        straggler_reports=settings.straggler.reports,
        straggler_reduce=settings.straggler.reduce,
        health_factor=settings.health.slow_factor,
        quarantine_after=quarantine.after_crashes,
        crash_window_s=quarantine.crash_window_s,
        quarantine_s=quarantine.duration_s,
        quarantine_patience_s=quarantine.patience_s,
    )


def _refuse_low_price(market: MarketSettings, min_workers: int) -> None:
    most = market.max_price_per_hour
    least = min_workers * (
        market.on_demand_price if market.use == "on_demand" else market.spot_price
    )
    if 0 < most < least:
        raise UserError(
            f"market.max_price_per_hour={most:g}: the {min_workers} workers that the run needs at "
            f"least cost {least:g} an hour: raise it, or lower the minimum of --workers"
        )


def _fraction_of(name: str) -> float:
    """A number from 0 to 1, a hash of the name."""
    return int.from_bytes(sha256(name.encode()).digest()[:4], "big") / 2**32


def worker_options(
    run_folder: str,
    settings: TrainSettings,
    faults: tuple[Fault, ...] = (),
    profile: str | None = None,
) -> WorkerOptions:
    """`run_folder` is the URL of the run, `profile` the text of `--profile`. Raises `UserError`."""
    return WorkerOptions(
        run_folder=run_folder,
        collective_timeout_s=settings.failure.collective_timeout_s,
        checkpoint_every=settings.checkpoint.every_steps,
        snapshot_every=settings.snapshot.every_steps,
        audit_every=settings.audit.every,
        straggler_every=settings.straggler.every,
        health=HealthOptions(**settings.health.model_dump()),
        network=Network(settings.network.interface, settings.network.port_range),
        faults=faults,
        profiled=parse_profile(profile) if profile else None,
    )


def parse_profile(text: str) -> tuple[int, int]:
    """The first and the last step of `steps=10:13`, or of `steps=10`. Raises `UserError`."""
    match = re.fullmatch(r"steps=([0-9]{1,12})(?::([0-9]{1,12}))?", text)
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= first <= last:
        raise UserError(
            f"--profile {text}: give the first and the last step, counted from 1, e.g. steps=10:13"
        )
    return first, last
