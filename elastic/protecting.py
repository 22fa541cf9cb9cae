"""Protecting the state: keepers are started where snapshots are needed, and asked what they have
where the living do not cover the state."""

from __future__ import annotations

from math import inf

from elastic.backoff import backoff_s
from elastic.commands import AskKeepers, Command, ForgetSnapshots, Protect, StartKeeper, StopKeeper
from elastic.events import KeeperLost, KeeperReady, KeeperSuspected, KeeperTold
from elastic.keeping import Placement, place_snapshots, shortfall
from elastic.parity import num_chunks_of
from elastic.phases import Running
from elastic.recovery import choose_source, living
from elastic.state import CoreState, Shelf

MAX_BACKOFF_S = 60.0


def on_keeper(
    state: CoreState,
    now: float,
    event: KeeperReady | KeeperSuspected | KeeperLost | KeeperTold,
) -> list[Command]:
    """What a keeper tells, or its end: what it had is gone, and another is started in its place
    when there is need and time for it."""
    match event:
        case KeeperSuspected():
            # What it keeps may be needed where the living do not cover the state.
            if event.node in state.keepers and living(state):
                return [StopKeeper(event.node, event.cause)]
        case KeeperReady():
            state.starting_keepers.discard(event.keeper.node)
            state.keepers[event.keeper.node] = event.keeper
            state.protect_at = now
        case KeeperLost():
            state.starting_keepers.discard(event.node)
            state.keepers.pop(event.node, None)
            state.slots.pop(event.node, None)
            state.parities.pop(event.node, None)
            state.asked.discard(event.node)
            state.num_keeper_losses += 1
            first_s, num_losses = state.policy.restart_backoff_s, state.num_keeper_losses
            state.no_keeper_before = now + backoff_s(first_s, num_losses, MAX_BACKOFF_S)
            state.protect_at = now
        case KeeperTold():
            if event.generation == state.generation and event.node in state.asked:
                state.asked.discard(event.node)
                state.slots[event.node] = event.slots
                state.parities[event.node] = event.parities
                stop_asking(state, now)
    return []


def ask_keepers(state: CoreState, now: float) -> list[Command]:
    """Where the living do not cover the state: ask what there is to go on from, once for as long as
    nobody trains."""
    if state.are_asked or not state.shelves or not state.keepers or living(state):
        return []
    state.are_asked = True
    state.slots.clear()
    state.parities.clear()
    state.asked = set(state.keepers)
    state.asked_until = now + state.policy.keeper_timeout_s
    state.are_keepers_late = False
    return [AskKeepers(state.generation, tuple(sorted(state.keepers)))]


def asking_deadline(state: CoreState) -> float:
    """When those who have not answered are late, or too late."""
    if not state.asked:
        return inf
    policy = state.policy
    grace_s = min(policy.keeper_grace_s, policy.keeper_timeout_s)
    return state.asked_until - (not state.are_keepers_late) * (policy.keeper_timeout_s - grace_s)


def stop_asking(state: CoreState, now: float) -> None:
    """Who is late is not waited for once the others have what snapshots promise; who is too late
    not at all."""
    state.are_keepers_late |= now >= asking_deadline(state)
    if state.asked and state.are_keepers_late and (now >= state.asked_until or _are_enough(state)):
        state.asked.clear()


def _are_enough(state: CoreState) -> bool:
    """Whether what has been told of brings back a state that is as new as a promised one."""
    source = choose_source(state)
    return (
        source.kind == "snapshot"
        and state.committed_step - source.step <= state.policy.snapshot_every
    )


def is_protected(state: CoreState) -> bool:
    """Whether by the latest vote all parts are whole at keepers."""
    vote = state.last_vote
    return (
        bool(state.protected.copies)
        and vote is not None
        and vote.num_snapshots == len(state.members())
    )


def shelve(state: CoreState, step: int) -> None:
    """A generation is being formed from this step: snapshots of later ones are void."""
    state.shelves = [shelf for shelf in state.shelves if shelf.is_used]
    for shelf in state.shelves:
        shelf.newest_step = step if shelf.newest_step is None else min(step, shelf.newest_step)
    state.protected, state.num_set_changes = Placement(), 0


def begin_shelf(state: CoreState, now: float) -> None:
    """Training begins: from now on snapshots are taken under the assignment that is held."""
    state.are_asked = False
    if state.policy.snapshot_every and state.held:
        state.shelves.append(Shelf(state.held.assignment))
        state.wanted_keepers, state.protect_at, state.num_keeper_losses = None, now, 0


def drop_older(state: CoreState) -> list[Command]:
    """Free the snapshots of earlier generations once this one's are whole, or none is needed; and
    the machines on which only a keeper is left."""
    if len(state.shelves) < 2 or state.wanted_keepers is None:
        return []
    if state.wanted_keepers and not is_protected(state):
        return []
    state.shelves = state.shelves[-1:]
    if not state.keepers:
        return []
    generation = state.shelves[0].assignment.generation
    peopled = {seat.node for seat in state.seats.values()}
    deserted = sorted(state.keepers.keys() - peopled - state.wanted_keepers)
    forget: Command = ForgetSnapshots(generation, tuple(sorted(state.keepers)))
    return [forget, *(StopKeeper(node, "nobody trains there any more") for node in deserted)]


def protect_deadline(state: CoreState) -> float:
    """When the protection is to be worked out: with the keepers there are at once, with others
    when a step has committed."""
    if state.protect_at is None or not isinstance(state.phase, Running) or state.ending:
        return inf
    has_begun = state.wanted_keepers is not None or not state.keepers
    return inf if has_begun and not state.phase.num_commits else state.protect_at


def protect(state: CoreState, now: float) -> list[Command]:
    """Start keepers where they are needed, and tell the members of those that are there."""
    if now < protect_deadline(state) or not state.held:
        return []
    state.protect_at = None
    assignment = state.held.assignment
    topology = {worker: seat.place for worker, seat in state.seats.items()}
    nodes = {topology[worker].node: topology[worker] for worker in sorted(state.warm)}
    lasting = {node: place for node, place in nodes.items() if node not in state.draining}
    there = lasting or nodes
    num_chunks = num_chunks_of(state.policy.snapshot_redundancy)
    wanted = place_snapshots(assignment, topology, sorted(there.values()), num_chunks)
    state.wanted_keepers = {node for copies in wanted.copies.values() for node in copies}
    commands = _start_missing(state, now)
    present = [keeper.place for node, keeper in state.keepers.items() if node in there]
    return commands + _tell(
        state, place_snapshots(assignment, topology, sorted(present), num_chunks)
    )


def _start_missing(state: CoreState, now: float) -> list[Command]:
    assert state.wanted_keepers is not None and isinstance(state.phase, Running)
    missing = sorted(state.wanted_keepers - state.keepers.keys() - state.starting_keepers)
    if missing and not state.phase.num_commits:
        state.protect_at = now
        return []
    if missing and now < state.no_keeper_before:
        state.protect_at = state.no_keeper_before
        return []
    state.starting_keepers.update(missing)
    return [StartKeeper(node) for node in missing]


def _tell(state: CoreState, placement: Placement) -> list[Command]:
    """Not before all keepers that start are there, unless one has gone on whom members wait."""
    copies, former = placement.copies, state.protected
    has_lost = any(set(nodes) - state.keepers.keys() for nodes in former.copies.values())
    if placement == former or (state.starting_keepers and not has_lost):
        return []
    state.num_set_changes += bool(placement.sets or former.sets)
    state.protected = placement
    state.shelves[-1].is_used = True
    members = state.members()
    keepers = tuple(
        tuple(state.keepers[node] for node in copies.get(worker, ())) for worker in members
    )
    reason = shortfall(placement, num_chunks_of(state.policy.snapshot_redundancy))
    sets, num_changes = placement.sets, state.num_set_changes
    return [Protect(state.generation, members, keepers, sets, num_changes, reason)]
