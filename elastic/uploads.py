"""Uploads: checkpoints whose parts are being written, and those that will never be whole."""

from __future__ import annotations

from collections.abc import Callable

from elastic.assignment import Assignment
from elastic.state import CoreState, Upload

PATIENCE_FACTOR = 4.0
"""A part is late after so many times the longest recent write."""


def upload_key(generation: int, step: int) -> str:
    return f"{generation}:{step}"


def write_patience_s(state: CoreState) -> float:
    """How long the parts of a checkpoint may take before those that are missing are late."""
    longest_s = max(state.checkpoint_costs.writes_s, default=0.0)
    return max(state.policy.save_timeout_s, PATIENCE_FACTOR * longest_s)


def open_upload(
    state: CoreState,
    now: float,
    generation: int,
    step: int,
    writers: set[str],
    assignment: Assignment,
) -> None:
    """Expect the parts of a checkpoint from these workers."""
    deadline = now + write_patience_s(state)
    upload = Upload(step, generation, set(writers), assignment, now, deadline)
    state.uploads.setdefault(upload_key(generation, step), upload)


def break_uploads(
    state: CoreState, which: Callable[[Upload], bool] = lambda upload: True
) -> list[Upload]:
    """Give these up; what has been written of them is removed with the next that is."""
    broken = {key: upload for key, upload in state.uploads.items() if which(upload)}
    for key, upload in broken.items():
        del state.uploads[key]
        state.litter.append((upload.step, upload.generation))
    return list(broken.values())


def break_upload(state: CoreState, generation: int, step: int) -> bool:
    """Give this one up, if there is such a one."""
    key = upload_key(generation, step)
    if key not in state.uploads:
        return False
    broken = state.uploads[key]
    break_uploads(state, lambda upload: upload is broken)
    return True
