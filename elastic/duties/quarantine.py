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
controller stops its worker, and the next one would get the same device.
"""

from __future__ import annotations

from collections import Counter
from math import inf
from statistics import median

from elastic.duties.membership import participants
from elastic.protocol.commands import Command, NodeQuarantined, NodeReleased, StopWorker
from elastic.protocol.controller_state import CoreState, Crash, Quarantine, WorkerRecord
from elastic.protocol.events import WorkerLost
from elastic.protocol.phases import Aborting, Pausing, Running, Waiting

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


def on_crash(state: CoreState, now: float, event: WorkerLost) -> list[Command]:
    """Count a loss against its node; call this before the worker is removed."""
    worker_record = state.worker_records.get(event.worker)
    node = (worker_record.node if worker_record else "") or event.node
    if worker_record is None or not node or not state.policy.quarantine_after:
        return []
    if event.worker in state.draining and not worker_record.has_broken_device:
        return []
    is_at_work = isinstance(state.phase, Running | Pausing | Aborting)
    step = state.committed_step + 1 if is_at_work and event.worker in state.members() else 0
    recent = [c for c in state.crashes if now - c.time < state.policy.crash_window_s]
    is_known_crash = event.is_crash or worker_record.has_broken_device
    is_excused = not is_known_crash and _was_useful(state, worker_record, now)
    crash = Crash(now, worker_record.since, node, step, is_excused)
    state.crashes = [*recent, crash]
    counts = _counts(state)
    commands = _clear_nodes(state, crash, counts)
    if node not in state.quarantined and _is_to_blame(state, node, counts):
        _quarantine(state, now, node)
        cause = f"workers have crashed there {counts[node]} times"
        commands.append(NodeQuarantined(node, state.quarantined[node], cause))
    return commands


def quarantine_deadline(state: CoreState) -> float:
    """When the next quarantined node may be used again."""
    patience = [_patience_until(state, node) for node in state.quarantined]
    return min([*state.quarantined.values(), *patience, _starving_until(state)], default=inf)


def follow_up(state: CoreState, now: float) -> list[Command]:
    """Release nodes whose quarantine is over; note since when the run lacks workers."""
    if not state.quarantined or not _is_short(state):
        state.short_since = None
    elif state.short_since is None:
        state.short_since = now
    if not state.quarantined:
        return []
    causes = {n: "its quarantine is over" for n, until in state.quarantined.items() if now >= until}
    for node in state.quarantined:
        if now >= _patience_until(state, node):
            waited_s = f"{_patience_s(state, node):.0f} s"
            causes.setdefault(node, f"no other capacity arrived within {waited_s}")
    if now >= _starving_until(state):
        causes = dict.fromkeys(state.quarantined, "too few workers arrived on other nodes")
    state.crashes = [crash for crash in state.crashes if crash.node not in causes]
    return _release_nodes(state, causes)


def release_standbys(state: CoreState) -> list[Command]:
    """Stop standby workers on quarantined nodes, so that others replace them elsewhere.

    Call this when workers come or go, and before a generation forms.
    """
    if not state.quarantined:
        return []
    busy = participants(state).union(*(held.holders for held in state.holdings()))
    commands: list[Command] = []
    for worker in sorted(state.warm - state.draining - busy):
        is_enough = state.num_staying() > state.policy.min_workers
        if state.worker_records[worker].node in state.quarantined and is_enough:
            state.draining.add(worker)
            commands.append(StopWorker(worker, "its node is avoided"))
    return commands


def _was_useful(state: CoreState, worker_record: WorkerRecord, now: float) -> bool:
    """Whether a worker was ready for longer than a start takes, without waiting for a node."""
    start_s = min(state.recent_start_s, default=0.0)
    return worker_record.is_ready and now - worker_record.since >= max(start_s, MIN_USEFUL_S)


def _quarantine(state: CoreState, now: float, node: str) -> None:
    """Quarantine a node, for twice as long as the last time."""
    lately = {n: q for n, q in state.quarantines.items() if now < _forgotten_at(state, q)}
    number = lately[node].number + 1 if node in lately else 1
    state.quarantines = {**lately, node: Quarantine(number, now)}
    state.quarantined[node] = now + _duration_s(state, number)


def _duration_s(state: CoreState, number: int) -> float:
    """How long the quarantine of this number, counted from 1, lasts."""
    return state.policy.quarantine_s * 2.0 ** min(number - 1, MAX_DOUBLINGS)


def _forgotten_at(state: CoreState, quarantine: Quarantine) -> float:
    """When this quarantine no longer lengthens the next one."""
    calm_s = FORGET_AFTER * state.policy.quarantine_s
    return quarantine.since + _duration_s(state, quarantine.number) + calm_s


def _is_short(state: CoreState) -> bool:
    """Whether fewer workers stay than the run wants."""
    return state.num_staying() < state.policy.max_workers - state.num_given_back


def _patience_s(state: CoreState, node: str) -> float:
    """How long the run waits for capacity elsewhere before it uses a quarantined node again."""
    start_s = median(state.recent_start_s) if state.recent_start_s else 0.0
    first_s = max(state.policy.quarantine_patience_s, GROWTHS_OF_PATIENCE * start_s)
    number = state.quarantines[node].number
    doubled_s = first_s * 2.0 ** min(number - 1, MAX_DOUBLINGS)
    return min(doubled_s, _duration_s(state, number))


def _patience_until(state: CoreState, node: str) -> float:
    if state.short_since is None:
        return inf
    return max(state.short_since, state.quarantines[node].since) + _patience_s(state, node)


def _counts(state: CoreState) -> Counter[str]:
    """How many crashes count against each node: those that hit no other node at the same time."""
    nodes_by_step: dict[int, set[str]] = {}
    for crash in state.crashes:
        nodes_by_step.setdefault(crash.step, set()).add(crash.node)
    moments: list[tuple[float, set[str]]] = []
    for crash in state.crashes:
        if crash.is_excused or (crash.step and len(nodes_by_step[crash.step]) > 1):
            continue
        if not moments or not _is_same_moment(crash, moments[-1][0]):
            moments.append((crash.time, set()))
        moments[-1][1].add(crash.node)
    return Counter(node for _, nodes in moments if len(nodes) == 1 for node in nodes)


def _is_same_moment(crash: Crash, earlier: float) -> bool:
    return crash.since < earlier and crash.time - earlier < TOGETHER_S


def _is_to_blame(state: CoreState, node: str, counts: Counter[str]) -> bool:
    """Whether a node crashes over twice as often as the median of the others, and the run has
    workers elsewhere. A program that crashes everywhere blames no node; two bad nodes of many do
    not excuse each other."""
    nodes = {
        worker_record.node for worker_record in state.worker_records.values() if worker_record.node
    } | counts.keys()
    others = sorted(counts[other] for other in nodes - {node})
    typical = others[len(others) // 2] if others else 0
    elsewhere = {state.worker_records[worker].node for worker in state.warm - state.draining}
    elsewhere -= {node} | state.quarantined.keys() | state.node_drains.keys()
    return (
        counts[node] >= state.policy.quarantine_after
        and counts[node] > 2 * typical
        and bool(elsewhere)
    )


def _clear_nodes(state: CoreState, crash: Crash, counts: Counter[str]) -> list[Command]:
    """Release nodes whose crashes are shared with other nodes, at one moment or during one step."""
    crashed_nodes = {
        other.node
        for other in state.crashes
        if other is crash
        or _is_same_moment(crash, other.time)
        or (crash.step and other.step == crash.step)
    }
    if len(crashed_nodes) < 2:
        return []
    cleared = [
        n
        for n in crashed_nodes & state.quarantined.keys()
        if counts[n] < state.policy.quarantine_after
    ]
    cause = "workers on other nodes crashed at the same moment or step"
    return _release_nodes(state, dict.fromkeys(sorted(cleared), cause))


def _starving_until(state: CoreState) -> float:
    """Until when a run with fewer workers than its minimum waits for others."""
    phase = state.phase
    if not isinstance(phase, Waiting) or not state.quarantined:
        return inf
    if state.num_staying() >= state.policy.min_workers:
        return inf
    newest = max(state.quarantines[node].since for node in state.quarantined)
    return max(phase.since, newest) + state.policy.start_timeout_s


def _release_nodes(state: CoreState, causes: dict[str, str]) -> list[Command]:
    """Use nodes again. Workers still waiting for a place elsewhere are restarted, so that they may
    start on these nodes."""
    for node in causes:
        del state.quarantined[node]
    starting = state.worker_records.keys() - state.warm - state.draining
    waiting = sorted(
        w for w in starting if causes.keys() & set(state.worker_records[w].quarantined)
    )
    state.draining.update(waiting)
    released: list[Command] = [NodeReleased(node, cause) for node, cause in causes.items()]
    restart = "it can now start on more nodes"
    return released + [StopWorker(worker, restart) for worker in waiting]
