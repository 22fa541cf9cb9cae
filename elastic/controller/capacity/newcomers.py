"""Newcomers: workers in their first generation, and what follows if it does not form.

A worker that others cannot reach breaks every attempt that it takes part in. While the members hold
the whole state, they go on without the newcomers of a broken attempt: these are deferred until a
step has committed. Later growths take those that broke fewer attempts first, and half of them if
all broke as many. A worker that breaks an attempt again as its only newcomer is stopped, and counts
against its node; so is one whose program fails to build while those of the members do not.
"""

from __future__ import annotations

from collections.abc import Mapping

from elastic.duties.membership import forget, note_change
from elastic.duties.quarantine import blame
from elastic.duties.recovery import find_live_state
from elastic.geometry.assignment import Assignment
from elastic.geometry.topology import Place
from elastic.protocol.commands import Command, StopWorker
from elastic.protocol.controller_state import ControllerState
from elastic.protocol.phases import Aborting

ALONE = "twice no generation formed because of it"
FAILED = "its program failed while a generation formed"


def defer_or_stop(state: ControllerState, now: float, phase: Aborting) -> list[Command]:
    """All survivors of an abort have unwound: defer the newcomers of an attempt that broke
    without a loss, or stop those that are to blame."""
    newcomers = phase.newcomers & state.membership.records.keys()
    if phase.excuses_newcomers or phase.raised or state.ending:
        return []
    if not newcomers or not find_live_state(state):
        return []
    guilty, cause = newcomers & phase.failed, FAILED
    if not guilty and not phase.num_lost:
        counts = state.forming.deferred
        if len(newcomers) == 1 and newcomers <= counts.keys():
            guilty, cause = newcomers, ALONE
        counts.update({worker: counts.get(worker, 0) + 1 for worker in newcomers})
        note_change(state, now)  # or the run would expect its next growth to cost little
    commands: list[Command] = []
    for worker in sorted(guilty):
        commands += [*blame(state, now, worker, cause), StopWorker(worker, cause)]
        forget(state, now, worker, cause)
    return commands


def admitted(
    state: ControllerState, previous: Assignment, staying: Mapping[str, Place]
) -> Mapping[str, Place]:
    """Those of the workers that stay which may take part in the next generation."""
    if not state.forming.deferred:
        return staying
    members = set(previous.members)
    counts = {w: n for w, n in state.forming.deferred.items() if w in staying and w not in members}
    if counts and not state.forming.num_attempts:
        fewest = sorted(w for w, n in counts.items() if n == min(counts.values()))
        taken = fewest if len(fewest) < len(counts) else fewest[: (len(fewest) + 1) // 2]
        counts = {worker: n for worker, n in counts.items() if worker not in taken}
    return {worker: place for worker, place in staying.items() if worker not in counts}


def trust_members(state: ControllerState) -> None:
    """A step has committed: its generation has formed."""
    members, records = set(state.live.members()), state.membership.records
    deferred = state.forming.deferred.items()
    state.forming.deferred = {w: n for w, n in deferred if w in records and w not in members}
