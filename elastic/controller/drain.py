"""Drain: workers and nodes that leave the run by plan.

The run leaves a draining node at the next step boundary. If no boundary is expected before the
node's end, waiting gains nothing: the current step is lost either way. Then the controller aborts
the generation ahead of that end. If the other workers hold all of the state, they continue at once.
If not, the workers on the node still live and hold their part, so they take part until they have
sent it. If they die before that, it is a loss like any other, and snapshots are what remains.

If too few workers would stay, the run trains on until others arrive: the announced end may not
come, and a stalled run saves nothing. A checkpoint is requested at once.
"""

from __future__ import annotations

from bisect import bisect_left
from functools import partial
from math import inf

from elastic.controller.aborting import abort
from elastic.controller.capacity.next_assignment import can_train
from elastic.controller.health import on_degraded
from elastic.duties.checkpoints import is_saving
from elastic.duties.membership import (
    drain_for_good,
    drain_workers,
    forget,
    note_change,
    participants,
)
from elastic.duties.recovery import find_live_state
from elastic.protocol.commands import Command, StopWorker
from elastic.protocol.controller_state import ControllerState
from elastic.protocol.duty_records import Drain
from elastic.protocol.events import NodeAtRisk, NodeDraining, WorkerDraining
from elastic.protocol.notes import Warned
from elastic.protocol.phases import Breakable, Forming, Resharding

NODE_GRACE_S = 60.0
"""Value of the policy field `drain_grace_s`."""


def on_notice(
    state: ControllerState, now: float, event: WorkerDraining | NodeDraining | NodeAtRisk
) -> list[Command]:
    """Handle a request to drain a worker, or a notice about a node."""
    match event:
        case WorkerDraining(is_degraded=True):
            return on_degraded(state, now, event, partial(can_train, state))
        case WorkerDraining():
            return _drain_worker(state, event.worker)
        case NodeDraining() if now < event.deadline + state.policy.drain_grace_s:
            return _drain_node(state, now, event)
        case NodeAtRisk():
            # Only report and save: most such nodes live on, and draining one costs its work.
            if is_saving(state) and state.live.held:
                state.checkpoints.want_save(now)
            text = f"node {event.node} may be reclaimed soon: {event.cause}"
            return [Warned(state.generation, state.committed_step, "notice", text)]
    return []


def end_drains(state: ControllerState, now: float) -> None:
    """Use a node again that has outlived its announced end."""
    for node in [node for node in state.membership.node_drains if now >= _end(state, node)]:
        drain = state.membership.node_drains.pop(node)
        usable_again = drain.draining_workers & state.membership.draining
        state.membership.draining -= usable_again
        if usable_again and state.growth.standby_since is None:
            state.growth.standby_since = now
        if state.snapshots.sets:
            state.snapshots.placement_at = now


def drain_end(state: ControllerState) -> float:
    """When the next draining node has outlived its announced end."""
    return min((_end(state, node) for node in state.membership.node_drains), default=inf)


def members_drain(state: ControllerState) -> bool:
    """Whether members drain and a pause is due. Not yet if too few workers would stay only because
    nodes drain, nor if the run cannot train without a late writer."""
    draining_workers = state.membership.draining.intersection(state.live.members())
    if not draining_workers:
        return False
    if draining_workers <= state.checkpoints.late_writers:
        return _enough_stay(state) and can_train(state)
    if _enough_stay(state):
        return True
    drained = set[str]().union(
        *(drain.draining_workers for drain in state.membership.node_drains.values())
    )
    return not draining_workers <= drained | state.checkpoints.late_writers


def is_too_late_to_pause(state: ControllerState, now: float) -> bool:
    """Whether a node ends before the next step boundary, by the median of the latest steps."""
    return drain_deadline(state) < max(
        now, state.steps.boundary_at + state.steps.measured.median_s()
    )


def drain_deadline(state: ControllerState) -> float:
    """Until when the run may wait for a step boundary, or for a draining node's workers."""
    return _next_end(state)[0]


def drain_at_once(state: ControllerState, now: float) -> list[Command]:
    """Abort the generation ahead of the end of the node that ends first. If the other workers hold
    all of the state, stop the node's workers before."""
    _, node = _next_end(state)
    cause = f"node {node} ends before the next step boundary"
    gone = _workers_gone_with(state, node)
    not_needed = gone if find_live_state(state, without=gone) else set[str]()
    note_change(state, now)
    commands: list[Command] = []
    for worker in sorted(not_needed):
        forget(state, now, worker, cause)
        commands.append(StopWorker(worker, cause))
    return commands + abort(state, now, cause, len(not_needed))


def _drain_worker(state: ControllerState, worker: str) -> list[Command]:
    """Drain one worker: it holds no rank after the next step boundary."""
    return drain_for_good(state, worker) if worker in state.membership.records else []


def _drain_node(state: ControllerState, now: float, event: NodeDraining) -> list[Command]:
    """Drain all workers of a node, and place no more snapshots there."""
    is_new = event.node not in state.membership.node_drains
    drain = state.membership.node_drains.setdefault(event.node, Drain(event.deadline))
    drain.deadline = event.deadline
    workers_there = state.membership.on(event.node)
    drain.draining_workers |= workers_there - state.membership.draining
    commands = drain_workers(state, workers_there)
    if state.snapshots.sets:
        state.snapshots.placement_at = now
    is_wanted = (is_new and is_saving(state)) or not _enough_stay(state)
    if workers_there and state.live.held and is_wanted:
        state.checkpoints.want_save(now)
    return commands


def _enough_stay(state: ControllerState) -> bool:
    return state.membership.num_staying() >= state.policy.min_workers


def _end(state: ControllerState, node: str) -> float:
    return state.membership.node_drains[node].deadline + state.policy.drain_grace_s


def _next_end(state: ControllerState) -> tuple[float, str]:
    """Until when the run may continue with all workers on draining nodes, and the node that ends
    this. Moving the parts of workers that are needed takes as long as the last reshard.

    The later a node ends, the more workers are gone with it, and the less of the state is left. So
    two nodes count: the first that ends, and the first whose workers are needed.
    """
    drains, phase = state.membership.node_drains, state.phase
    if not drains or not isinstance(phase, Breakable) or not _enough_stay(state):
        return inf, ""
    workers_on: dict[str, list[str]] = {node: [] for node in drains}
    for worker, record in state.membership.records.items():
        if record.node in drains:
            workers_on[record.node].append(worker)
    at_work, gone = participants(state), list[str]()
    ends, num_gone = list[tuple[float, str]](), dict[float, int]()
    for deadline, node in sorted((drain.deadline, node) for node, drain in drains.items()):
        gone += workers_on[node]
        num_gone[deadline] = len(gone)
        if not at_work.isdisjoint(workers_on[node]):
            ends.append((deadline, node))
    # Their parts may be being moved: then they are needed as long as they live.
    reshard_s = -inf if isinstance(phase, Forming | Resharding) else state.forming.reshard_s
    relevant = [end for end in ends if end == ends[0] or end[0] - reshard_s <= ends[0][0]]
    first_needed = bisect_left(
        relevant,
        True,
        key=lambda end: find_live_state(state, without=set(gone[: num_gone[end[0]]])) is None,
    )
    latest = relevant[:1] if first_needed else []
    latest += [(end - reshard_s, node) for end, node in relevant[first_needed:][:1]]
    return min(latest, default=(inf, ""))


def _workers_gone_with(state: ControllerState, node: str) -> set[str]:
    """The workers on nodes that end no later than this node."""
    drains = state.membership.node_drains
    gone = {other for other, drain in drains.items() if drain.deadline <= drains[node].deadline}
    return {worker for worker, record in state.membership.records.items() if record.node in gone}
