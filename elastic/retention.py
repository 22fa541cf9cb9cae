"""Retention: which checkpoints are kept, so that storage does not fill up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from elastic.policy import Policy


def kept(steps: Sequence[int], losses: Mapping[int, float], policy: Policy) -> set[int]:
    """Of these saved steps, those to keep: the newest, those of each multiple, and the best by the
    held-out `losses` (by step, as far as known; of equal ones the newer step)."""
    if not policy.keep_last:
        return set(steps)
    found = set(sorted(steps)[-policy.keep_last :])
    if policy.keep_every:
        found.update(step for step in steps if step % policy.keep_every == 0)
    measured = sorted((losses[step], -step) for step in steps if step in losses)
    return found.union(-negative for _, negative in measured[: policy.keep_best])
