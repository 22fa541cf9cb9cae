"""The policy that a run gets: from its settings and its numbers of workers."""

from __future__ import annotations

from dataclasses import fields
from hashlib import sha256

from elastic.policy import Policy
from pipelines.settings import TrainSettings


def policy_of(settings: TrainSettings, min_workers: int, max_workers: int, run_name: str) -> Policy:
    """What is set alike in both has one name; the rest has the defaults."""
    alike = {field.name for field in fields(Policy)} & TrainSettings.model_fields.keys()
    return Policy(
        min_workers=min_workers,
        max_workers=max_workers,
        checkpoint_every_s=settings.checkpoint_s,
        checkpoint_auto=settings.checkpoint_every == "auto",
        gang_jitter=_share_of(run_name),
        **{name: getattr(settings, name) for name in alike},
    )


def _share_of(name: str) -> float:
    """A number from 0 to 1 that differs between names."""
    return int.from_bytes(sha256(name.encode()).digest()[:4], "big") / 2**32
