"""Giving way: two runs that each hold half of a cluster would wait for each other for ever.

One that has long had fewer workers than it needs gives all of them back, and asks again later.
"""

from __future__ import annotations

from math import inf

from elastic.backoff import backoff_s
from elastic.commands import Command, StopWorker
from elastic.phases import Waiting
from elastic.saving import is_saved
from elastic.state import CoreState

LONGEST_PAUSE_S = 1800.0


def give_way_deadline(state: CoreState) -> float:
    """Nobody has come for long. Each run's patience is another, so that of several the first makes
    room for the others."""
    phase, policy = state.phase, state.policy
    if not isinstance(phase, Waiting) or not _has_too_few(state):
        return inf
    newest = max(state.seats[worker].since for worker in state.warm - state.leaving)
    return newest + policy.gang_timeout_s * (1 + policy.gang_jitter)


def give_way(state: CoreState, now: float) -> list[Command]:
    """End all workers, if it is time; those who do not run yet are not asked for any more."""
    if now < give_way_deadline(state):
        return []
    state.num_given_way += 1
    pause_s = backoff_s(state.policy.gang_pause_s, state.num_given_way, LONGEST_PAUSE_S)
    state.not_again_before = now + pause_s * (1 + state.policy.gang_jitter)
    workers = sorted(state.seats.keys() - state.leaving)
    state.leaving.update(workers)
    return [StopWorker(worker, "too few others have come") for worker in workers]


def _has_too_few(state: CoreState) -> bool:
    """Whether some are held for nothing, and nothing is lost with them."""
    num_staying = state.num_staying()
    return 0 < num_staying < state.policy.min_workers and is_saved(state) and not state.ending
