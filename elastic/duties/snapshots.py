"""Snapshot control: starts snapshot servers, places snapshots, and queries servers after losses."""

from __future__ import annotations

from math import inf

from elastic.duties.recovery import choose_source, find_live_state
from elastic.protocol.commands import (
    Command,
    ForgetSnapshots,
    QuerySnapshotServers,
    StartSnapshots,
    StartSnapshotServer,
    StopSnapshotServer,
)
from elastic.protocol.controller_state import ControllerState
from elastic.protocol.duty_records import SnapshotSet
from elastic.protocol.notes import Warned
from elastic.protocol.phases import Running
from elastic.protocol.policy import backoff_s
from elastic.protocol.snapshot_events import (
    SnapshotServerLost,
    SnapshotServerReady,
    SnapshotServerReported,
    SnapshotServerSuspected,
    SnapshotTimed,
)
from elastic.reshard.parity import num_chunks_of
from elastic.reshard.snapshot_interval import AUTO_EVERY, interval_for
from elastic.reshard.snapshot_placement import Placement, place_snapshots, shortfall

SERVER_GRACE_S = 0.5
"""Value of the policy field `snapshot_server_grace_s`."""
MAX_BACKOFF_S = 60.0
START_FACTOR = 12
"""A snapshot server that is not ready after so many times `snapshot.server_timeout_s` is late."""


def on_snapshots(
    state: ControllerState,
    now: float,
    event: SnapshotServerReady
    | SnapshotServerSuspected
    | SnapshotServerLost
    | SnapshotServerReported
    | SnapshotTimed,
) -> list[Command]:
    """Handle an event of a snapshot server, or a report of what snapshots cost.

    If a server is lost, its snapshots are gone. Another starts in its place if it is needed, after
    a back-off.
    """
    match event:
        case SnapshotTimed():
            return _on_timed(state, event)
        case SnapshotServerSuspected():
            # Its snapshots may be needed if the live workers do not hold the whole state.
            if event.node in state.snapshots.servers and find_live_state(state):
                return [StopSnapshotServer(event.node, event.cause)]
        case SnapshotServerReady():
            state.snapshots.starting_since.pop(event.snapshot_server.node, None)
            state.snapshots.late_starts.discard(event.snapshot_server.node)
            state.snapshots.servers[event.snapshot_server.node] = event.snapshot_server
            state.snapshots.placement_at = now
        case SnapshotServerLost():
            if event.node in state.snapshots.servers.keys() | state.snapshots.starting_since.keys():
                _lose_server(state, now, event.node)  # else it was stopped while it started
        case SnapshotServerReported():
            if event.generation == state.generation and event.node in state.snapshots.pending:
                state.snapshots.pending.discard(event.node)
                state.snapshots.slots[event.node] = event.slots
                state.snapshots.parities[event.node] = event.parities
                stop_querying(state, now)
    return []


def _lose_server(state: ControllerState, now: float, node: str) -> None:
    """A node's server is gone, or will be."""
    snapshots = state.snapshots
    snapshots.starting_since.pop(node, None)
    snapshots.servers.pop(node, None)
    snapshots.slots.pop(node, None)
    snapshots.parities.pop(node, None)
    snapshots.pending.discard(node)
    snapshots.num_losses += 1
    pause_s = backoff_s(state.policy.restart_backoff_s, snapshots.num_losses, MAX_BACKOFF_S)
    snapshots.no_server_before = now + pause_s
    snapshots.placement_at = now


def query_snapshot_servers(state: ControllerState, now: float) -> list[Command]:
    """If the live workers do not hold the whole state, ask the snapshot servers what they hold.
    This happens once until training resumes."""
    if (
        state.snapshots.are_queried
        or not state.snapshots.sets
        or not state.snapshots.servers
        or find_live_state(state)
    ):
        return []
    state.snapshots.are_queried = True
    state.snapshots.slots.clear()
    state.snapshots.parities.clear()
    state.snapshots.pending = set(state.snapshots.servers)
    state.snapshots.queried_until = now + state.policy.snapshot_server_timeout_s
    state.snapshots.are_late = False
    return [QuerySnapshotServers(state.generation, tuple(sorted(state.snapshots.servers)))]


def query_deadline(state: ControllerState) -> float:
    """When servers without an answer become late; after that, when the controller stops waiting."""
    if not state.snapshots.pending:
        return inf
    policy = state.policy
    grace_s = min(policy.snapshot_server_grace_s, policy.snapshot_server_timeout_s)
    return state.snapshots.queried_until - (not state.snapshots.are_late) * (
        policy.snapshot_server_timeout_s - grace_s
    )


def stop_querying(state: ControllerState, now: float) -> None:
    """Stop waiting for late servers once the others hold a recent enough state; stop waiting for
    servers that are too late in any case."""
    state.snapshots.are_late |= now >= query_deadline(state)
    if (
        state.snapshots.pending
        and state.snapshots.are_late
        and (now >= state.snapshots.queried_until or _are_reports_sufficient(state))
    ):
        state.snapshots.pending.clear()


def _are_reports_sufficient(state: ControllerState) -> bool:
    """Whether the reported snapshots restore a state as recent as snapshots promise."""
    source = choose_source(state)
    is_recent = state.committed_step - source.step <= _every(state)
    return source.kind == "snapshot" and is_recent


def _every(state: ControllerState) -> int:
    """The steps between snapshots."""
    is_auto = state.policy.snapshot_every == AUTO_EVERY
    return state.snapshots.every or (1 if is_auto else state.policy.snapshot_every)


def _on_timed(state: ControllerState, event: SnapshotTimed) -> list[Command]:
    """Change the interval if the costliest worker calls for it."""
    snapshots = state.snapshots
    is_current = event.generation == state.generation and isinstance(state.phase, Running)
    nodes = {node for copies in snapshots.placement.copies.values() for node in copies}
    if not nodes or not is_current or not nodes <= snapshots.servers.keys():
        return []  # after the next `StartSnapshots` it is reported again
    snapshots.costs[event.worker] = (event.share, event.num_steps)
    former, setting = _every(state), state.policy.snapshot_every
    every = max(interval_for(s, former, n, setting) for s, n in snapshots.costs.values())
    if every == former:
        return []
    snapshots.every = every
    snapshots.num_set_changes += 1
    commands: list[Command] = []
    if setting != AUTO_EVERY and every > former:
        text = (
            f"a snapshot of {event.worker} takes {event.num_steps:.1f} steps: snapshots are taken "
            f"every {every} steps, not every {setting} as snapshot.every says"
        )
        commands.append(Warned(state.generation, state.committed_step, "snapshot", text))
    return [*commands, _order_to(state, snapshots.placement)]


def has_snapshots(state: ControllerState) -> bool:
    """Whether, by the latest vote, all parts are whole at snapshot servers."""
    vote = state.steps.last_vote
    return (
        bool(state.snapshots.placement.copies)
        and vote is not None
        and vote.num_snapshots == len(state.live.members())
    )


def retire_snapshot_set(state: ControllerState, step: int) -> None:
    """A generation forms from this step: snapshots of later steps are void."""
    state.snapshots.sets = [
        snapshot_set for snapshot_set in state.snapshots.sets if snapshot_set.is_used
    ]
    for snapshot_set in state.snapshots.sets:
        snapshot_set.newest_step = (
            step if snapshot_set.newest_step is None else min(step, snapshot_set.newest_step)
        )
    state.snapshots.placement, state.snapshots.num_set_changes = Placement(), 0


def begin_snapshot_set(state: ControllerState, now: float) -> None:
    """Training begins: from now on snapshots are taken under the current assignment."""
    state.snapshots.are_queried = False
    if state.policy.snapshot_every and state.live.held:
        state.snapshots.sets.append(SnapshotSet(state.live.held.assignment))
        state.snapshots.costs.clear()
        state.snapshots.wanted, state.snapshots.placement_at, state.snapshots.num_losses = (
            None,
            now,
            0,
        )


def drop_older(state: ControllerState) -> list[Command]:
    """Free the snapshots of earlier generations once those of this generation are whole, or none is
    needed. Also stop snapshot servers on nodes without workers."""
    if state.snapshots.sets and has_snapshots(state):
        state.snapshots.sets[-1].was_whole = True
    if len(state.snapshots.sets) < 2 or state.snapshots.wanted is None:
        return []
    if state.snapshots.wanted and not has_snapshots(state):
        return _drop_incomplete(state)
    state.snapshots.sets = state.snapshots.sets[-1:]
    if not state.snapshots.servers:
        return []
    generation = state.snapshots.sets[0].assignment.generation
    with_workers = {worker_record.node for worker_record in state.membership.records.values()}
    unused = sorted(state.snapshots.servers.keys() - with_workers - state.snapshots.wanted)
    forget: Command = ForgetSnapshots(generation, tuple(sorted(state.snapshots.servers)))
    return [
        forget,
        *(StopSnapshotServer(node, "no worker trains on its node any more") for node in unused),
    ]


def _drop_incomplete(state: ControllerState) -> list[Command]:
    """Free the snapshots of earlier generations that were never whole. Otherwise generations that
    end early would fill the memory of the servers."""
    *earlier, current = state.snapshots.sets
    whole = [snapshot_set for snapshot_set in earlier if snapshot_set.was_whole][-1:]
    if len(whole) == len(earlier):
        return []
    state.snapshots.sets = [*whole, current]
    kept_generation = whole[0].assignment.generation if whole else 0
    nodes = tuple(sorted(state.snapshots.servers))
    forget = ForgetSnapshots(current.assignment.generation, nodes, kept_generation)
    return [forget] if nodes else []


def placement_deadline(state: ControllerState) -> float:
    """When to place the snapshots: at once on the servers that exist, on new ones after a committed
    step, on the others if one is not ready in time."""
    if not isinstance(state.phase, Running) or state.ending:
        return inf
    due = min(
        (_ready_deadline(state, node) for node in state.snapshots.starting_since), default=inf
    )
    has_begun = state.snapshots.wanted is not None or not state.snapshots.servers
    if state.snapshots.placement_at is None or (has_begun and not state.phase.num_commits):
        return due
    return min(due, state.snapshots.placement_at)


def _ready_deadline(state: ControllerState, node: str) -> float:
    """When a server that starts is late."""
    limit_s = START_FACTOR * state.policy.snapshot_server_timeout_s
    return state.snapshots.starting_since[node] + limit_s


def _stop_late_servers(state: ControllerState, now: float) -> list[Command]:
    """Stop the servers that are not ready in time. They are started again after a back-off, but
    snapshots do not wait for them any more."""
    commands: list[Command] = []
    for node in sorted(state.snapshots.starting_since):
        if now >= _ready_deadline(state, node):
            after_s = now - state.snapshots.starting_since[node]
            cause = f"the snapshot server of node {node} is not ready after {after_s:.0f} s"
            if node not in state.snapshots.late_starts:
                text = f"{cause}: it is started again, and snapshots go to the others"
                commands.append(Warned(state.generation, state.committed_step, "snapshot", text))
            commands.append(StopSnapshotServer(node, cause))
            _lose_server(state, now, node)
            state.snapshots.late_starts.add(node)
    return commands


def update_placement(state: ControllerState, now: float) -> list[Command]:
    """Start the missing snapshot servers, and order snapshots to those that are ready."""
    if now < placement_deadline(state) or not state.live.held:
        return []
    stops = _stop_late_servers(state, now)
    state.snapshots.placement_at = None
    assignment = state.live.held.assignment
    topology = {
        worker: worker_record.place for worker, worker_record in state.membership.records.items()
    }
    nodes = {topology[worker].node: topology[worker] for worker in sorted(state.membership.warm)}
    lasting = {
        node: place for node, place in nodes.items() if node not in state.membership.node_drains
    }
    candidates = lasting or nodes
    num_chunks = num_chunks_of(state.policy.snapshot_redundancy)
    placement = place_snapshots(assignment, topology, sorted(candidates.values()), num_chunks)
    state.snapshots.wanted = {node for copies in placement.copies.values() for node in copies}
    commands = stops + _start_missing(state, now)
    present = [
        snapshot_server.place
        for node, snapshot_server in state.snapshots.servers.items()
        if node in candidates
    ]
    return commands + _order_snapshots(
        state, place_snapshots(assignment, topology, sorted(present), num_chunks)
    )


def _start_missing(state: ControllerState, now: float) -> list[Command]:
    """Start the missing servers, but not before a step has committed, and not during a back-off."""
    assert state.snapshots.wanted is not None and isinstance(state.phase, Running)
    expected = state.snapshots.servers.keys() | state.snapshots.starting_since.keys()
    missing = sorted(state.snapshots.wanted - expected)
    if missing and not state.phase.num_commits:
        state.snapshots.placement_at = now
        return []
    if missing and now < state.snapshots.no_server_before:
        state.snapshots.placement_at = state.snapshots.no_server_before
        return []
    state.snapshots.starting_since.update(dict.fromkeys(missing, now))
    return [StartSnapshotServer(node) for node in missing]


def _order_snapshots(state: ControllerState, placement: Placement) -> list[Command]:
    """Order snapshots once all starting servers are ready that may be in time, or at once if a
    server in use is lost."""
    former, starting = state.snapshots.placement, state.snapshots.starting_since.keys()
    has_lost = any(set(nodes) - state.snapshots.servers.keys() for nodes in former.copies.values())
    if placement == former or (starting - state.snapshots.late_starts and not has_lost):
        return []
    state.snapshots.num_set_changes += bool(placement.sets or former.sets)
    state.snapshots.placement = placement
    state.snapshots.sets[-1].is_used = True
    return [_order_to(state, placement)]


def _order_to(state: ControllerState, placement: Placement) -> StartSnapshots:
    """Order snapshots to the servers of a placement, all of which exist."""
    members = state.live.members()
    snapshot_servers = tuple(
        tuple(state.snapshots.servers[node] for node in placement.copies.get(worker, ()))
        for worker in members
    )
    reason = shortfall(placement, num_chunks_of(state.policy.snapshot_redundancy))
    sets, num_changes = placement.sets, state.snapshots.num_set_changes
    every = _every(state)
    return StartSnapshots(
        state.generation,
        members,
        snapshot_servers,
        sets,
        num_changes,
        reason,
        0 if every == state.policy.snapshot_every else every,
    )
