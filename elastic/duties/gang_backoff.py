"""Gang back-off: a run that has too few workers for long returns all of them and retries later.

Otherwise two runs that each hold half of a cluster would wait for each other for ever.
"""

from __future__ import annotations

from math import inf

from elastic.duties.checkpoints import is_saved
from elastic.protocol.commands import Command, StopWorker
from elastic.protocol.controller_state import ControllerState
from elastic.protocol.phases import Waiting
from elastic.protocol.policy import backoff_s

FIRST_PAUSE_S = 30.0
"""Value of the policy field `gang_pause_s`."""
LONGEST_PAUSE_S = 1800.0


def return_deadline(state: ControllerState) -> float:
    """When to return the workers, because no other has become ready for the gang timeout. The
    timeout differs between runs, so that one run returns its workers first."""
    phase, policy = state.phase, state.policy
    if not isinstance(phase, Waiting) or not _has_too_few(state):
        return inf
    return state.membership.joined_at + policy.gang_timeout_s * (1 + policy.gang_jitter)


def return_workers(state: ControllerState, now: float) -> list[Command]:
    """Stop all workers if it is time; requests for more workers are withdrawn."""
    if now < return_deadline(state):
        return []
    state.gang.num_backoffs += 1
    pause_s = backoff_s(state.policy.gang_pause_s, state.gang.num_backoffs, LONGEST_PAUSE_S)
    state.gang.no_request_before = now + pause_s * (1 + state.policy.gang_jitter)
    workers = sorted(state.membership.records.keys() - state.membership.draining)
    state.membership.draining.update(workers)
    return [StopWorker(worker, "too few other workers arrived") for worker in workers]


def _has_too_few(state: ControllerState) -> bool:
    """Whether workers are held without use, and stopping them loses nothing."""
    num_staying = state.membership.num_staying()
    return 0 < num_staying < state.policy.min_workers and is_saved(state) and not state.ending
