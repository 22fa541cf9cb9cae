"""Avoided nodes: where workers crash again and again, and what is wrong no restart mends.

A crash is the end of a worker's process that nobody has planned. What strikes several workers at
once says little of any node: the crashes of one moment count once, and not at all where they are on
several nodes; nor do those amid one step that happen on several nodes, one after the other, since
they follow the batch (see `blaming`). A node is avoided if it has had `avoid_after` crashes within
the window, over twice as many as any other, and the run has workers elsewhere.

Then nobody is started there. Its members train on, and who is spare there is let go, as far as the
minimum allows. It is used again after `avoid_for_s`, or where without it the run has had fewer
workers than the minimum for `start_timeout_s`.
"""

from __future__ import annotations

from collections import Counter
from math import inf

from elastic.commands import Command, NodeAvoided, NodeUsedAgain, StopWorker
from elastic.events import WorkerLost
from elastic.phases import Aborting, Pausing, Running, Waiting
from elastic.roster import participants
from elastic.state import CoreState, Crash

TOGETHER_S = 1.0
"""Who was there at a crash and is lost within this time of it has been struck by the same: those of
a node that is gone are missed in less. Who was started since has not, however soon it crashes."""


def on_crash(state: CoreState, now: float, event: WorkerLost) -> list[Command]:
    """Note what a loss says of its node; to be called before the worker is forgotten."""
    seat = state.seats.get(event.worker)
    node = (seat.node if seat else "") or event.node
    if seat is None or not node or event.worker in state.leaving or not state.policy.avoid_after:
        return []
    is_at_work = isinstance(state.phase, Running | Pausing | Aborting)
    step = state.committed_step + 1 if is_at_work and event.worker in state.members() else 0
    recent = [c for c in state.crashes if now - c.time < state.policy.avoid_window_s]
    crash = Crash(now, seat.since, node, step)
    state.crashes = [*recent, crash]
    counts = _counts(state)
    commands = _acquit(state, crash, counts)
    if node not in state.avoided and _is_to_blame(state, node, counts):
        state.avoided[node] = now + state.policy.avoid_for_s
        told = f"workers have crashed there {counts[node]} times"
        commands.append(NodeAvoided(node, state.avoided[node], told))
    return commands


def avoid_deadline(state: CoreState) -> float:
    """When an avoided node is to be used again."""
    return min([*state.avoided.values(), _starving_until(state)], default=inf)


def follow_up(state: CoreState, now: float) -> list[Command]:
    """Use nodes again whose time has come."""
    if not state.avoided:
        return []
    over = {n: "its time is over" for n, until in state.avoided.items() if now >= until}
    if now >= _starving_until(state):
        over = dict.fromkeys(state.avoided, "too few workers have come elsewhere")
    state.crashes = [crash for crash in state.crashes if crash.node not in over]
    return _use_again(state, over)


def let_go_of_spares(state: CoreState) -> list[Command]:
    """Those on avoided nodes: others shall take their places elsewhere. To be called where
    workers come or go, and before a generation is formed."""
    if not state.avoided:
        return []
    busy = participants(state).union(*(held.holders for held in state.holdings()))
    commands: list[Command] = []
    for worker in sorted(state.warm - state.leaving - busy):
        is_enough = state.num_staying() > state.policy.min_workers
        if state.seats[worker].node in state.avoided and is_enough:
            state.leaving.add(worker)
            commands.append(StopWorker(worker, "its node is avoided"))
    return commands


def _counts(state: CoreState) -> Counter[str]:
    """How often each node has been struck, and no other with it."""
    nodes_by_step: dict[int, set[str]] = {}
    for crash in state.crashes:
        nodes_by_step.setdefault(crash.step, set()).add(crash.node)
    moments: list[tuple[float, set[str]]] = []
    for crash in state.crashes:
        if crash.step and len(nodes_by_step[crash.step]) > 1:
            continue
        if not moments or not _is_same_moment(crash, moments[-1][0]):
            moments.append((crash.time, set()))
        moments[-1][1].add(crash.node)
    return Counter(node for _, nodes in moments if len(nodes) == 1 for node in nodes)


def _is_same_moment(crash: Crash, earlier: float) -> bool:
    return crash.since < earlier and crash.time - earlier < TOGETHER_S


def _is_to_blame(state: CoreState, node: str, counts: Counter[str]) -> bool:
    others = max((number for other, number in counts.items() if other != node), default=0)
    elsewhere = {state.seats[worker].node for worker in state.warm - state.leaving}
    elsewhere -= {node} | state.avoided.keys() | state.draining.keys()
    return (
        counts[node] >= state.policy.avoid_after and counts[node] > 2 * others and bool(elsewhere)
    )


def _acquit(state: CoreState, crash: Crash, counts: Counter[str]) -> list[Command]:
    """What has struck elsewhere as well, at that moment or amid that step, was not its fault."""
    struck = {
        other.node
        for other in state.crashes
        if other is crash
        or _is_same_moment(crash, other.time)
        or (crash.step and other.step == crash.step)
    }
    if len(struck) < 2:
        return []
    cleared = [n for n in struck & state.avoided.keys() if counts[n] < state.policy.avoid_after]
    cause = "workers elsewhere have been struck by the same"
    return _use_again(state, dict.fromkeys(sorted(cleared), cause))


def _starving_until(state: CoreState) -> float:
    """Until when others are waited for where the minimum is not there."""
    phase = state.phase
    if not isinstance(phase, Waiting) or not state.avoided:
        return inf
    if state.num_staying() >= state.policy.min_workers:
        return inf
    newest = max(state.avoided.values()) - state.policy.avoid_for_s
    return max(phase.since, newest) + state.policy.start_timeout_s


def _use_again(state: CoreState, causes: dict[str, str]) -> list[Command]:
    """Who still looks for a place elsewhere is started anew, and may come there."""
    for node in causes:
        del state.avoided[node]
    starting = state.seats.keys() - state.warm - state.leaving
    late = sorted(w for w in starting if causes.keys() & set(state.seats[w].avoided))
    state.leaving.update(late)
    told: list[Command] = [NodeUsedAgain(node, cause) for node, cause in causes.items()]
    return told + [StopWorker(worker, "it may be started on more nodes now") for worker in late]
