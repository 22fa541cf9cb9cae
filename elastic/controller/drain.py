"""Leaving by plan: workers that are asked to go, and nodes that have announced their end.

A draining node is left at the next step boundary. Where no boundary is to be expected before its
end, nothing is won by waiting for it: the step under way is lost either way. Then the generation is
broken off ahead of that end. If the others have all of the state they go on at once; if not, those
on the node still live and still hold their part, so they take part until they have given it. Should
they be gone before that, it is a loss like any other, and snapshots are what is left.

Where too few would stay, the run trains on until others have come: the announced end may not come,
and to stand still would save nothing. A checkpoint is wished for at once.
"""

from __future__ import annotations

from collections.abc import Set
from math import inf

from elastic.controller.aborting import abort
from elastic.controller.forming import next_assignment
from elastic.duties.checkpoints import is_saving
from elastic.duties.membership import forget, note_change, participants
from elastic.duties.recovery import living
from elastic.geometry.errors import Infeasible
from elastic.protocol.commands import Command, StopWorker, Warned
from elastic.protocol.controller_state import CoreState, Drain
from elastic.protocol.events import NodeAtRisk, NodeDraining, WorkerDraining
from elastic.protocol.phases import Breakable, Forming, Resharding


def on_notice(
    state: CoreState, now: float, event: WorkerDraining | NodeDraining | NodeAtRisk
) -> list[Command]:
    """A worker is asked to go, or what a node has been told of itself."""
    match event:
        case WorkerDraining():
            return _ask_to_go(state, event.worker)
        case NodeDraining() if now < event.deadline + state.policy.drain_grace_s:
            return _drain(state, now, event)
        case NodeAtRisk():
            # No more than told: most such nodes live on, and to leave one costs its work.
            if is_saving(state) and state.held:
                state.want_save(now)
            text = f"node {event.node} may be taken before long: {event.cause}"
            return [Warned(state.generation, state.committed_step, "notice", text)]
    return []


def end_drains(state: CoreState, now: float) -> None:
    """A node that should have been gone long ago may be there: it is used like any other."""
    for node in [node for node in state.node_drains if now >= _end(state, node)]:
        drain = state.node_drains.pop(node)
        come_back = drain.draining_workers & state.draining
        state.draining -= come_back
        if come_back and state.standby_since is None:
            state.standby_since = now
        if state.snapshot_sets:
            state.placement_at = now


def drain_end(state: CoreState) -> float:
    """When the next of these is to be looked at."""
    return min((_end(state, node) for node in state.node_drains), default=inf)


def members_drain(state: CoreState) -> bool:
    """Whether a pause is wanted for members that go; not yet if too few would be left only because
    nodes drain, nor while the run cannot train without a late writer."""
    draining_workers = state.draining.intersection(state.members())
    if not draining_workers:
        return False
    if draining_workers <= state.late_writers:
        return _enough_stay(state) and _can_train_without_them(state)
    if _enough_stay(state):
        return True
    drained = set[str]().union(*(drain.draining_workers for drain in state.node_drains.values()))
    return not draining_workers <= drained | state.late_writers


def is_too_late_to_pause(state: CoreState, now: float) -> bool:
    """Whether a node will be gone before the next boundary, by the median of the latest steps."""
    return drain_deadline(state) < max(now, state.boundary_at + state.median_step_s())


def drain_deadline(state: CoreState) -> float:
    """Until when what goes on may wait for a boundary, or for a node's workers at all."""
    return min((_latest(state, node) for node in state.node_drains), default=inf)


def drain_at_once(state: CoreState, now: float) -> list[Command]:
    """Break the generation off ahead of the end of the node that will be gone first; who has no
    part of the state that the others lack is let go before."""
    node = min(state.node_drains, key=lambda node: (_latest(state, node), node))
    cause = f"node {node} will be gone before the next boundary"
    gone = _gone_with(state, node)
    needless = gone if living(state, without=gone) else set[str]()
    note_change(state, now)
    commands: list[Command] = []
    for worker in sorted(needless):
        forget(state, now, worker, cause)
        commands.append(StopWorker(worker, cause))
    return commands + abort(state, now, cause, len(needless))


def _ask_to_go(state: CoreState, worker: str) -> list[Command]:
    """It shall hold no rank any more from the next boundary on."""
    if worker not in state.worker_records:
        return []
    for drain in state.node_drains.values():
        drain.draining_workers.discard(worker)  # it goes, whatever becomes of its node
    state.late_writers.discard(worker)
    return _let_go(state, {worker})


def _drain(state: CoreState, now: float, event: NodeDraining) -> list[Command]:
    """The same of all workers of a node; no snapshot is brought there any more."""
    is_new = event.node not in state.node_drains
    drain = state.node_drains.setdefault(event.node, Drain(event.deadline))
    drain.deadline = event.deadline
    there = state.on(event.node)
    drain.draining_workers |= there - state.draining
    commands = _let_go(state, there)
    if state.snapshot_sets:
        state.placement_at = now
    is_wanted = (is_new and is_saving(state)) or not _enough_stay(state)
    if there and state.held and is_wanted:
        state.want_save(now)
    return commands


def _let_go(state: CoreState, draining_workers: Set[str]) -> list[Command]:
    """Members go at the next boundary, those who do nothing at once."""
    state.draining |= draining_workers
    holders = (held.holders for held in state.holdings())
    busy = participants(state).union(*holders)
    return [
        StopWorker(w, "it leaves by plan")
        for w in state.worker_records
        if w in draining_workers - busy
    ]


def _can_train_without_them(state: CoreState) -> bool:
    """Whether there is a layout for the workers that stay."""
    previous = state.held.assignment if state.held else None
    return not isinstance(next_assignment(state, previous), Infeasible)


def _enough_stay(state: CoreState) -> bool:
    return state.num_staying() >= state.policy.min_workers


def _end(state: CoreState, node: str) -> float:
    return state.node_drains[node].deadline + state.policy.drain_grace_s


def _latest(state: CoreState, node: str) -> float:
    """Until when this node's workers may go on; their parts take as long to move as last time."""
    deadline, phase = state.node_drains[node].deadline, state.phase
    is_at_work = isinstance(phase, Breakable) and participants(state) & state.on(node)
    if not is_at_work or not _enough_stay(state):
        return inf
    if living(state, without=_gone_with(state, node)):
        return deadline
    if isinstance(phase, Forming | Resharding):
        return inf  # what they have is being moved: for that they are needed while they live
    return deadline - state.reshard_s


def _gone_with(state: CoreState, node: str) -> set[str]:
    """Who will be gone by the time that this node is."""
    by = state.node_drains[node].deadline
    nodes = (other for other, drain in state.node_drains.items() if drain.deadline <= by)
    return set[str]().union(*map(state.on, nodes))
