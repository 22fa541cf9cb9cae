"""What each worker of a run is told at its start, out of the settings and the command line."""

from __future__ import annotations

import re

from actors.fault import Fault
from actors.listening import Network
from actors.worker_options import WorkerOptions
from elastic.policy import Policy
from pipelines.errors import UserError
from pipelines.settings import TrainSettings


def worker_options(
    run_folder: str,
    settings: TrainSettings,
    policy: Policy,
    faults: tuple[Fault, ...] = (),
    profile: str | None = None,
) -> WorkerOptions:
    """`run_folder` is its URL, `profile` what `--profile` says. Raises `UserError`."""
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
    """The first and the last step of `steps=10:13`; `steps=10` is that one. Raises `UserError`."""
    found = re.fullmatch(r"steps=([0-9]{1,12})(?::([0-9]{1,12}))?", text)
    first, last = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 1 <= first <= last:
        raise UserError(
            f"--profile {text}: write the first and the last step, from 1, e.g. steps=10:13"
        )
    return first, last
