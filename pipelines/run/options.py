"""The controller policy and the worker options of a run, from its settings."""

from __future__ import annotations

import re
from dataclasses import fields
from hashlib import sha256

from actors.runtime.fault_spec import Fault
from actors.runtime.network import Network
from actors.worker.worker_options import WorkerOptions
from elastic.protocol.policy import Policy
from pipelines.settings import TrainSettings
from pipelines.settings.errors import UserError


def policy_of(settings: TrainSettings, min_workers: int, max_workers: int, run_name: str) -> Policy:
    """Fields that `Policy` and `TrainSettings` share have one name; others keep their defaults."""
    shared = {field.name for field in fields(Policy)} & TrainSettings.model_fields.keys()
    return Policy(
        min_workers=min_workers,
        max_workers=max_workers,
        checkpoint_every_s=settings.checkpoint_s,
        checkpoint_auto=settings.checkpoint_every == "auto",
        gang_jitter=_fraction_of(run_name),
        **{name: getattr(settings, name) for name in shared},
    )


def _fraction_of(name: str) -> float:
    """A number from 0 to 1, a hash of the name."""
    return int.from_bytes(sha256(name.encode()).digest()[:4], "big") / 2**32


def worker_options(
    run_folder: str,
    settings: TrainSettings,
    policy: Policy,
    faults: tuple[Fault, ...] = (),
    profile: str | None = None,
) -> WorkerOptions:
    """`run_folder` is the URL of the run, `profile` the text of `--profile`. Raises `UserError`."""
    return WorkerOptions(
        run_folder=run_folder,
        collective_timeout_s=policy.collective_timeout_s,
        checkpoint_every=settings.checkpoint_steps,
        faults=faults,
        snapshot_every=settings.snapshot_every,
        audit_every=settings.audit_every,
        network=Network(settings.network.interface, settings.network.port_range),
        straggler_every=settings.straggler_every,
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
