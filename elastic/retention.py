"""Retention: which checkpoints are kept, so that storage does not fill up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from elastic.policy import Policy

MAX_KNOWN = 128
"""Of checkpoints that are never removed the core knows so many."""


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


def known(steps: Sequence[int], policy: Policy) -> set[int]:
    """Of these saved steps (ascending), those that the core remembers: of what is never removed all
    newer ones, and the fewer the older. A resumed run finds all of them in storage."""
    never_removed = [
        step
        for step in steps
        if not policy.keep_last or (policy.keep_every and step % policy.keep_every == 0)
    ]
    found = set(steps)
    while len(never_removed) > MAX_KNOWN:
        forgotten = never_removed[1 : MAX_KNOWN // 2 : 2]
        found.difference_update(forgotten)
        never_removed = [step for step in never_removed if step in found]
    return found
