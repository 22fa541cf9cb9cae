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
from elastic.protocol.controller_state import CoreState, SnapshotSet
from elastic.protocol.events import (
    SnapshotServerLost,
    SnapshotServerReady,
    SnapshotServerReported,
    SnapshotServerSuspected,
)
from elastic.protocol.phases import Running
from elastic.protocol.policy import backoff_s
from elastic.reshard.parity import num_chunks_of
from elastic.reshard.snapshot_placement import Placement, place_snapshots, shortfall

MAX_BACKOFF_S = 60.0


def on_snapshot_server(
    state: CoreState,
    now: float,
    event: SnapshotServerReady
    | SnapshotServerSuspected
    | SnapshotServerLost
    | SnapshotServerReported,
) -> list[Command]:
    """Handle an event of a snapshot server. If one is lost, its snapshots are gone, and another
    starts in its place if it is needed, after a back-off."""
    match event:
        case SnapshotServerSuspected():
            # Its snapshots may be needed if the live workers do not hold the whole state.
            if event.node in state.snapshot_servers and find_live_state(state):
                return [StopSnapshotServer(event.node, event.cause)]
        case SnapshotServerReady():
            state.starting_snapshot_servers.discard(event.snapshot_server.node)
            state.snapshot_servers[event.snapshot_server.node] = event.snapshot_server
            state.placement_at = now
        case SnapshotServerLost():
            state.starting_snapshot_servers.discard(event.node)
            state.snapshot_servers.pop(event.node, None)
            state.slots.pop(event.node, None)
            state.parities.pop(event.node, None)
            state.asked.discard(event.node)
            state.num_snapshot_server_losses += 1
            first_s, num_losses = state.policy.restart_backoff_s, state.num_snapshot_server_losses
            state.no_snapshot_server_before = now + backoff_s(first_s, num_losses, MAX_BACKOFF_S)
            state.placement_at = now
        case SnapshotServerReported():
            if event.generation == state.generation and event.node in state.asked:
                state.asked.discard(event.node)
                state.slots[event.node] = event.slots
                state.parities[event.node] = event.parities
                stop_querying(state, now)
    return []


def query_snapshot_servers(state: CoreState, now: float) -> list[Command]:
    """If the live workers do not hold the whole state, ask the snapshot servers what they hold.
    This happens once until training resumes."""
    if (
        state.are_queried
        or not state.snapshot_sets
        or not state.snapshot_servers
        or find_live_state(state)
    ):
        return []
    state.are_queried = True
    state.slots.clear()
    state.parities.clear()
    state.asked = set(state.snapshot_servers)
    state.queried_until = now + state.policy.snapshot_server_timeout_s
    state.are_snapshot_servers_late = False
    return [QuerySnapshotServers(state.generation, tuple(sorted(state.snapshot_servers)))]


def query_deadline(state: CoreState) -> float:
    """When servers that have not answered are late, or too late."""
    if not state.asked:
        return inf
    policy = state.policy
    grace_s = min(policy.snapshot_server_grace_s, policy.snapshot_server_timeout_s)
    return state.queried_until - (not state.are_snapshot_servers_late) * (
        policy.snapshot_server_timeout_s - grace_s
    )


def stop_querying(state: CoreState, now: float) -> None:
    """Stop waiting for late servers once the others hold a recent enough state; stop waiting for
    servers that are too late in any case."""
    state.are_snapshot_servers_late |= now >= query_deadline(state)
    if (
        state.asked
        and state.are_snapshot_servers_late
        and (now >= state.queried_until or _are_reports_sufficient(state))
    ):
        state.asked.clear()


def _are_reports_sufficient(state: CoreState) -> bool:
    """Whether the reported snapshots restore a state as recent as snapshots promise."""
    source = choose_source(state)
    return (
        source.kind == "snapshot"
        and state.committed_step - source.step <= state.policy.snapshot_every
    )


def has_snapshots(state: CoreState) -> bool:
    """Whether, by the latest vote, all parts are whole at snapshot servers."""
    vote = state.last_vote
    return (
        bool(state.snapshot_placement.copies)
        and vote is not None
        and vote.num_snapshots == len(state.members())
    )


def retire_snapshot_set(state: CoreState, step: int) -> None:
    """A generation forms from this step: snapshots of later steps are void."""
    state.snapshot_sets = [
        snapshot_set for snapshot_set in state.snapshot_sets if snapshot_set.is_used
    ]
    for snapshot_set in state.snapshot_sets:
        snapshot_set.newest_step = (
            step if snapshot_set.newest_step is None else min(step, snapshot_set.newest_step)
        )
    state.snapshot_placement, state.num_set_changes = Placement(), 0


def begin_snapshot_set(state: CoreState, now: float) -> None:
    """Training begins: from now on snapshots are taken under the current assignment."""
    state.are_queried = False
    if state.policy.snapshot_every and state.held:
        state.snapshot_sets.append(SnapshotSet(state.held.assignment))
        state.wanted_snapshot_servers, state.placement_at, state.num_snapshot_server_losses = (
            None,
            now,
            0,
        )


def drop_older(state: CoreState) -> list[Command]:
    """Free the snapshots of earlier generations once this one's are whole, or none is needed. Also
    stop snapshot servers on nodes without workers."""
    if len(state.snapshot_sets) < 2 or state.wanted_snapshot_servers is None:
        return []
    if state.wanted_snapshot_servers and not has_snapshots(state):
        return []
    state.snapshot_sets = state.snapshot_sets[-1:]
    if not state.snapshot_servers:
        return []
    generation = state.snapshot_sets[0].assignment.generation
    with_workers = {worker_record.node for worker_record in state.worker_records.values()}
    unused = sorted(state.snapshot_servers.keys() - with_workers - state.wanted_snapshot_servers)
    forget: Command = ForgetSnapshots(generation, tuple(sorted(state.snapshot_servers)))
    return [
        forget,
        *(StopSnapshotServer(node, "no worker trains on its node any more") for node in unused),
    ]


def placement_deadline(state: CoreState) -> float:
    """When to place the snapshots: at once on the servers that exist, on new ones after a committed
    step."""
    if state.placement_at is None or not isinstance(state.phase, Running) or state.ending:
        return inf
    has_begun = state.wanted_snapshot_servers is not None or not state.snapshot_servers
    return inf if has_begun and not state.phase.num_commits else state.placement_at


def update_placement(state: CoreState, now: float) -> list[Command]:
    """Start the missing snapshot servers, and order snapshots to those that are ready."""
    if now < placement_deadline(state) or not state.held:
        return []
    state.placement_at = None
    assignment = state.held.assignment
    topology = {
        worker: worker_record.place for worker, worker_record in state.worker_records.items()
    }
    nodes = {topology[worker].node: topology[worker] for worker in sorted(state.warm)}
    lasting = {node: place for node, place in nodes.items() if node not in state.node_drains}
    candidates = lasting or nodes
    num_chunks = num_chunks_of(state.policy.snapshot_redundancy)
    placement = place_snapshots(assignment, topology, sorted(candidates.values()), num_chunks)
    state.wanted_snapshot_servers = {
        node for copies in placement.copies.values() for node in copies
    }
    commands = _start_missing(state, now)
    present = [
        snapshot_server.place
        for node, snapshot_server in state.snapshot_servers.items()
        if node in candidates
    ]
    return commands + _order_snapshots(
        state, place_snapshots(assignment, topology, sorted(present), num_chunks)
    )


def _start_missing(state: CoreState, now: float) -> list[Command]:
    """Start the missing servers, but not before a step has committed, and not during a back-off."""
    assert state.wanted_snapshot_servers is not None and isinstance(state.phase, Running)
    missing = sorted(
        state.wanted_snapshot_servers
        - state.snapshot_servers.keys()
        - state.starting_snapshot_servers
    )
    if missing and not state.phase.num_commits:
        state.placement_at = now
        return []
    if missing and now < state.no_snapshot_server_before:
        state.placement_at = state.no_snapshot_server_before
        return []
    state.starting_snapshot_servers.update(missing)
    return [StartSnapshotServer(node) for node in missing]


def _order_snapshots(state: CoreState, placement: Placement) -> list[Command]:
    """Order snapshots once all starting servers are ready, or at once if a server in use is
    lost."""
    copies, former = placement.copies, state.snapshot_placement
    has_lost = any(set(nodes) - state.snapshot_servers.keys() for nodes in former.copies.values())
    if placement == former or (state.starting_snapshot_servers and not has_lost):
        return []
    state.num_set_changes += bool(placement.sets or former.sets)
    state.snapshot_placement = placement
    state.snapshot_sets[-1].is_used = True
    members = state.members()
    snapshot_servers = tuple(
        tuple(state.snapshot_servers[node] for node in copies.get(worker, ())) for worker in members
    )
    reason = shortfall(placement, num_chunks_of(state.policy.snapshot_redundancy))
    sets, num_changes = placement.sets, state.num_set_changes
    return [StartSnapshots(state.generation, members, snapshot_servers, sets, num_changes, reason)]
