"""Giving way: two runs that each hold half of a cluster would wait for each other for ever.

One that has long had fewer workers than it needs gives all of them back, and asks again later.
"""

from __future__ import annotations

from math import inf

from elastic.duties.checkpoints import is_saved
from elastic.protocol.commands import Command, StopWorker
from elastic.protocol.controller_state import CoreState
from elastic.protocol.phases import Waiting
from elastic.protocol.policy import backoff_s

LONGEST_PAUSE_S = 1800.0


def return_deadline(state: CoreState) -> float:
    """Nobody has come for long. Each run's patience is another, so that of several the first makes
    room for the others."""
    phase, policy = state.phase, state.policy
    if not isinstance(phase, Waiting) or not _has_too_few(state):
        return inf
    newest = max(state.worker_records[worker].since for worker in state.warm - state.draining)
    return newest + policy.gang_timeout_s * (1 + policy.gang_jitter)


def return_workers(state: CoreState, now: float) -> list[Command]:
    """End all workers, if it is time; those who do not run yet are not asked for any more."""
    if now < return_deadline(state):
        return []
    state.num_gang_backoffs += 1
    pause_s = backoff_s(state.policy.gang_pause_s, state.num_gang_backoffs, LONGEST_PAUSE_S)
    state.not_again_before = now + pause_s * (1 + state.policy.gang_jitter)
    workers = sorted(state.worker_records.keys() - state.draining)
    state.draining.update(workers)
    return [StopWorker(worker, "too few others have come") for worker in workers]


def _has_too_few(state: CoreState) -> bool:
    """Whether some are held for nothing, and nothing is lost with them."""
    num_staying = state.num_staying()
    return 0 < num_staying < state.policy.min_workers and is_saved(state) and not state.ending
