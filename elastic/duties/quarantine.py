"""Quarantine of nodes on which workers crash repeatedly, since no restart fixes a bad node.

A crash is an unplanned end of a worker's process. Several crashes at one moment say little about
any node: on one node they count once, and on several nodes not at all. Crashes during one step on
several nodes, one after the other, do not count either, since they follow the batch (see
`poison_batches`). A node is quarantined if it had `quarantine_after` crashes within the window,
over twice as many as the median of the other nodes, and the run has workers elsewhere.

Then no worker starts there. Its members train on; standby workers there are stopped, as far as the
minimum allows. Quarantine is a preference, not a loss of capacity. The node is used again after
`quarantine_s`; when the run has had fewer workers than the minimum for `start_timeout_s`; and when
the run has lacked workers for as long as a growth takes, since no capacity arrived elsewhere. Each
further quarantine of the same node lasts twice as long.

A worker that something external may have killed (SIGKILL, the out-of-memory killer, a preemption;
on Ray every end without a known reason) does not count against its node if it trained for longer
than it took to start: such a node is better than none. A broken device always counts: the
controller stops its worker, and the next one would get the same device. So does a worker that the
controller stops because it hangs, holds other bits than its replicas, or keeps generations from
forming. A machine that fails a
check (`elastic.controller.health`) quarantines its node at once.
"""

from __future__ import annotations

from collections import Counter
from math import inf
from statistics import median

from elastic.duties.membership import participants
from elastic.protocol.commands import Command, StopWorker
from elastic.protocol.controller_state import ControllerState
from elastic.protocol.duty_records import Crash, Quarantine, WorkerRecord
from elastic.protocol.events import WorkerLost
from elastic.protocol.notes import NodeQuarantined, NodeReleased
from elastic.protocol.phases import Aborting, Pausing, Running, Waiting, newcomers_of

TOGETHER_S = 1.0
"""Crashes this close together have one cause, if the worker was already there at the earlier crash:
the loss of a whole node is noticed in less. A worker started after it has crashed by itself."""

MIN_USEFUL_S = 10.0
"""A worker that trained for less than this has done no useful work, however quickly it started."""
GROWTHS_OF_PATIENCE = 2.0
"""A run waits for capacity elsewhere for this many times the duration of a recent start."""
FORGET_AFTER = 8.0
"""A node's quarantines are forgotten this many times `quarantine_s` after its last quarantine."""
MAX_DOUBLINGS = 5


def on_crash(state: ControllerState, now: float, event: WorkerLost) -> list[Command]:
    """Count a loss against its node; call this before the worker is removed."""
    worker_record = state.membership.records.get(event.worker)
    node = (worker_record.node if worker_record else "") or event.node
    if worker_record is None or not node or not state.policy.quarantine_after:
        return []
    if event.worker in state.membership.draining and not worker_record.has_broken_device:
        return []
    is_at_work = isinstance(state.phase, Running | Pausing | Aborting)
    step = state.committed_step + 1 if is_at_work and event.worker in state.live.members() else 0
    recent = [c for c in state.quarantine.crashes if now - c.time < state.policy.crash_window_s]
    is_known_crash = event.is_crash or worker_record.has_broken_device
    is_new = event.worker in newcomers_of(state.phase)  # it has waited, but never trained
    is_excused = not (is_known_crash or is_new) and _was_useful(state, worker_record, now)
    crash = Crash(now, worker_record.since, node, step, is_excused)
    state.quarantine.crashes = [*recent, crash]
    counts = _counts(state)
    commands = _clear_nodes(state, crash, counts)
    if node not in state.quarantine.until and _is_to_blame(state, node, counts):
        cause = f"workers have crashed there {counts[node]} times"
        commands.append(_quarantine(state, now, node, cause))
    return commands


def blame(state: ControllerState, now: float, worker: str, cause: str) -> list[Command]:
    """Count a worker that the controller stops for a fault of its own against its node; call this
    before the worker is removed."""
    return on_crash(state, now, WorkerLost(worker, cause, is_crash=True))


def quarantine_unfit_node(
    state: ControllerState, now: float, node: str, cause: str
) -> list[Command]:
    """Quarantine the node of a machine that failed a check, if the run has workers elsewhere."""
    is_off = not state.policy.quarantine_after
    if is_off or not node or node in state.quarantine.until or not _elsewhere(state, node):
        return []
    return [_quarantine(state, now, node, cause, is_unfit=True)]


def quarantine_deadline(state: ControllerState) -> float:
    """When the next quarantined node may be used again."""
    patience = [_patience_until(state, node) for node in state.quarantine.until]
    return min([*state.quarantine.until.values(), *patience, _starving_until(state)], default=inf)


def follow_up(state: ControllerState, now: float) -> list[Command]:
    """Release nodes whose quarantine is over and standby workers on quarantined nodes; note since
    when the run lacks workers."""
    if not state.quarantine.until or not _is_short(state):
        state.quarantine.short_since = None
    elif state.quarantine.short_since is None:
        state.quarantine.short_since = now
    if not state.quarantine.until:
        return []
    causes = {
        n: "its quarantine is over" for n, until in state.quarantine.until.items() if now >= until
    }
    for node in state.quarantine.until:
        if now >= _patience_until(state, node):
            waited_s = f"{_patience_s(state, node):.0f} s"
            causes.setdefault(node, f"no other capacity arrived within {waited_s}")
    if now >= _starving_until(state):
        causes = dict.fromkeys(state.quarantine.until, "too few workers arrived on other nodes")
    state.quarantine.crashes = [
        crash for crash in state.quarantine.crashes if crash.node not in causes
    ]
    return _release_nodes(state, causes) + release_standbys(state)


def release_standbys(state: ControllerState) -> list[Command]:
    """Stop standby workers on quarantined nodes, so that others replace them elsewhere.

    A rule of `follow_up`; a handler that forms a generation applies it first.
    """
    if not state.quarantine.until:
        return []
    busy = participants(state).union(*(held.holders for held in state.live.holdings()))
    commands: list[Command] = []
    for worker in sorted(state.membership.warm - state.membership.draining - busy):
        is_enough = state.membership.num_staying() > state.policy.min_workers
        if state.membership.records[worker].node in state.quarantine.until and is_enough:
            state.membership.draining.add(worker)
            commands.append(StopWorker(worker, "its node is quarantined"))
    return commands


def _was_useful(state: ControllerState, worker_record: WorkerRecord, now: float) -> bool:
    """Whether a worker was ready for longer than a start takes, without waiting for a node."""
    start_s = min(state.membership.recent_start_s, default=0.0)
    return worker_record.is_ready and now - worker_record.since >= max(start_s, MIN_USEFUL_S)


def _quarantine(
    state: ControllerState, now: float, node: str, cause: str, is_unfit: bool = False
) -> NodeQuarantined:
    """Quarantine a node, for twice as long as the last time."""
    lately = {n: q for n, q in state.quarantine.past.items() if now < _forgotten_at(state, q)}
    number = lately[node].number + 1 if node in lately else 1
    state.quarantine.past = {**lately, node: Quarantine(number, now, is_unfit)}
    state.quarantine.until[node] = now + _duration_s(state, number)
    return NodeQuarantined(node, state.quarantine.until[node], cause)


def _duration_s(state: ControllerState, number: int) -> float:
    """How long the quarantine of this number, counted from 1, lasts."""
    return state.policy.quarantine_s * 2.0 ** min(number - 1, MAX_DOUBLINGS)


def _forgotten_at(state: ControllerState, quarantine: Quarantine) -> float:
    """When this quarantine no longer lengthens the next one."""
    calm_s = FORGET_AFTER * state.policy.quarantine_s
    return quarantine.since + _duration_s(state, quarantine.number) + calm_s


def _is_short(state: ControllerState) -> bool:
    """Whether fewer workers stay than the run wants."""
    return state.membership.num_staying() < state.policy.max_workers - state.growth.num_given_back


def _patience_s(state: ControllerState, node: str) -> float:
    """How long the run waits for capacity elsewhere before it uses a quarantined node again."""
    start_s = median(state.membership.recent_start_s) if state.membership.recent_start_s else 0.0
    first_s = max(state.policy.quarantine_patience_s, GROWTHS_OF_PATIENCE * start_s)
    number = state.quarantine.past[node].number
    doubled_s = first_s * 2.0 ** min(number - 1, MAX_DOUBLINGS)
    return min(doubled_s, _duration_s(state, number))


def _patience_until(state: ControllerState, node: str) -> float:
    if state.quarantine.short_since is None:
        return inf
    return max(state.quarantine.short_since, state.quarantine.past[node].since) + _patience_s(
        state, node
    )


def _counts(state: ControllerState) -> Counter[str]:
    """How many crashes count against each node: those that hit no other node at the same time."""
    nodes_by_step: dict[int, set[str]] = {}
    for crash in state.quarantine.crashes:
        nodes_by_step.setdefault(crash.step, set()).add(crash.node)
    moments: list[tuple[float, set[str]]] = []
    for crash in state.quarantine.crashes:
        if crash.is_excused or (crash.step and len(nodes_by_step[crash.step]) > 1):
            continue
        if not moments or not _is_same_moment(crash, moments[-1][0]):
            moments.append((crash.time, set()))
        moments[-1][1].add(crash.node)
    return Counter(node for _, nodes in moments if len(nodes) == 1 for node in nodes)


def _is_same_moment(crash: Crash, earlier: float) -> bool:
    return crash.since < earlier and crash.time - earlier < TOGETHER_S


def _is_to_blame(state: ControllerState, node: str, counts: Counter[str]) -> bool:
    """Whether a node crashes over twice as often as the median of the others, and the run has
    workers elsewhere. A program that crashes everywhere blames no node; two bad nodes of many do
    not excuse each other."""
    nodes = {
        worker_record.node
        for worker_record in state.membership.records.values()
        if worker_record.node
    } | counts.keys()
    others = sorted(counts[other] for other in nodes - {node})
    typical = others[len(others) // 2] if others else 0
    return (
        counts[node] >= state.policy.quarantine_after
        and counts[node] > 2 * typical
        and bool(_elsewhere(state, node))
    )


def _elsewhere(state: ControllerState, node: str) -> set[str]:
    """The other nodes with workers that stay."""
    nodes = {
        state.membership.records[worker].node
        for worker in state.membership.warm - state.membership.draining
    }
    return nodes - {node} - state.quarantine.until.keys() - state.membership.node_drains.keys()


def _clear_nodes(state: ControllerState, crash: Crash, counts: Counter[str]) -> list[Command]:
    """Release nodes whose crashes are shared with other nodes, at one moment or during one step."""
    crashed_nodes = {
        other.node
        for other in state.quarantine.crashes
        if other is crash
        or _is_same_moment(crash, other.time)
        or (crash.step and other.step == crash.step)
    }
    if len(crashed_nodes) < 2:
        return []
    cleared = [
        n
        for n in crashed_nodes & state.quarantine.until.keys()
        if counts[n] < state.policy.quarantine_after and not state.quarantine.past[n].is_unfit
    ]
    cause = "workers on other nodes crashed at the same moment or step"
    return _release_nodes(state, dict.fromkeys(sorted(cleared), cause))


def _starving_until(state: ControllerState) -> float:
    """Until when a run with fewer workers than its minimum waits for others."""
    phase = state.phase
    if not isinstance(phase, Waiting) or not state.quarantine.until:
        return inf
    if state.membership.num_staying() >= state.policy.min_workers:
        return inf
    newest = max(state.quarantine.past[node].since for node in state.quarantine.until)
    return max(phase.since, newest) + state.policy.start_timeout_s


def _release_nodes(state: ControllerState, causes: dict[str, str]) -> list[Command]:
    """Use nodes again. Workers still waiting for a place elsewhere are restarted, so that they may
    start on these nodes."""
    for node in causes:
        del state.quarantine.until[node]
    starting = state.membership.records.keys() - state.membership.warm - state.membership.draining
    waiting = sorted(
        w for w in starting if causes.keys() & set(state.membership.records[w].quarantined)
    )
    state.membership.draining.update(waiting)
    released: list[Command] = [NodeReleased(node, cause) for node, cause in causes.items()]
    restart = "it can now start on more nodes"
    return released + [StopWorker(worker, restart) for worker in waiting]
