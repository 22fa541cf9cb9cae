"""The policy and the worker options that users get, with a test's own changes.

Tests begin with these, so that they cover what users run; each names the values that it needs to
differ.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from actors.worker.worker_options import WorkerOptions
from elastic.protocol.policy import Policy
from pipelines.run.options import policy_of, worker_options
from pipelines.settings import TrainSettings

NOTHING_PERIODIC: dict[str, Any] = {
    "checkpoint_auto": False,
    "keep_last": 0,
    "keep_best": 0,
    "snapshot_every": 0,
    "straggler_every": 0,
}
"""No checkpoint is due by time, none is ever removed, and there are no snapshots or reports of
compute time: for tests of another duty, whose commands would be among these."""


def users_policy(min_workers: int = 1, max_workers: int = 1, **changes: Any) -> Policy:
    """The policy of a run without `--set`; without a name's own `gang_jitter`, so that times are
    round numbers."""
    policy = policy_of(TrainSettings(), min_workers, max_workers, "run")
    return replace(policy, **{"gang_jitter": 0.0, **changes})


def quiet_policy(min_workers: int = 1, max_workers: int = 1, **changes: Any) -> Policy:
    """As `users_policy`, with `NOTHING_PERIODIC`."""
    return users_policy(min_workers, max_workers, **{**NOTHING_PERIODIC, **changes})


def users_options(run_folder: str, **changes: Any) -> WorkerOptions:
    """The options of a worker of a run without `--set`."""
    return replace(worker_options(run_folder, TrainSettings()), **changes)
