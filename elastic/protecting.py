"""Protecting the state: keepers are started where snapshots are needed, and asked what they have
when a generation breaks."""

from __future__ import annotations

from elastic.assignment import Assignment
from elastic.commands import AskKeepers, Command, ForgetSnapshots, Protect, StartKeeper
from elastic.events import KeeperLost, KeeperReady, KeeperTold
from elastic.keeping import place_snapshots
from elastic.phases import Running
from elastic.state import CoreState, Shelf


def on_keeper(state: CoreState, event: KeeperReady | KeeperLost | KeeperTold) -> None:
    """What a keeper tells, or its end: what it had is gone, and another is started in its place
    when there is need and time for it."""
    match event:
        case KeeperReady():
            state.starting_keepers.discard(event.keeper.node)
            state.keepers[event.keeper.node] = event.keeper
            state.protection_is_due = True
        case KeeperLost():
            state.starting_keepers.discard(event.node)
            state.keepers.pop(event.node, None)
            state.slots.pop(event.node, None)
            state.asked.discard(event.node)
            state.protection_is_due = True
        case KeeperTold():
            if event.generation == state.generation and event.node in state.asked:
                state.asked.discard(event.node)
                state.slots[event.node] = event.slots


def ask_keepers(state: CoreState, now: float) -> list[Command]:
    """Ask what there is to go on from; training changes it, so it is asked each time."""
    state.slots.clear()
    state.asked = set(state.keepers)
    state.asked_until = now + state.policy.keeper_timeout_s
    if not state.keepers:
        return []
    return [AskKeepers(state.generation, tuple(sorted(state.keepers)))]


def still_asked(state: CoreState, now: float) -> bool:
    """Whether an answer may still come that decides from where the run goes on."""
    return bool(state.asked) and now < state.asked_until


def shelve(state: CoreState, old: Assignment | None, step: int) -> list[Command]:
    """A generation is being formed from a step of `old`: all other snapshots are void."""
    kept = [shelf for shelf in state.shelves if shelf.assignment == old]
    state.shelves = [Shelf(shelf.assignment, step) for shelf in kept]
    state.protected = {}
    return [] if kept else _forget(state, state.generation)


def begin_shelf(state: CoreState, assignment: Assignment) -> None:
    """Training begins: from now on snapshots are taken under this assignment."""
    if state.policy.snapshot_every:
        state.shelves.append(Shelf(assignment))
        state.wanted_keepers, state.protection_is_due = None, True


def drop_older(state: CoreState, num_snapshots: int) -> list[Command]:
    """Free the snapshots of earlier generations once this one's are whole, or none is needed."""
    if len(state.shelves) < 2 or state.wanted_keepers is None:
        return []
    newest = state.shelves[-1]
    is_whole = bool(state.protected) and num_snapshots == len(newest.assignment.members)
    if state.wanted_keepers and not is_whole:
        return []
    state.shelves = [newest]
    return _forget(state, newest.assignment.generation)


def protect(state: CoreState) -> list[Command]:
    """Start keepers where they are needed, and tell the members of those that are there."""
    phase = state.phase
    calm = isinstance(phase, Running) and phase.num_commits > 0
    if not calm or not state.protection_is_due or not state.held or state.ending:
        return []
    state.protection_is_due = False
    assignment = state.held.assignment
    topology = {worker: seat.place for worker, seat in state.seats.items()}
    there = {topology[worker].node: topology[worker] for worker in sorted(state.warm)}
    wanted = place_snapshots(assignment, topology, sorted(there.values()))
    state.wanted_keepers = {node for copies in wanted.values() for node in copies}
    missing = sorted(state.wanted_keepers - state.keepers.keys() - state.starting_keepers)
    state.starting_keepers.update(missing)
    commands: list[Command] = [StartKeeper(node) for node in missing]
    present = [keeper.place for node, keeper in state.keepers.items() if node in there]
    placement = place_snapshots(assignment, topology, present)
    if placement == state.protected:
        return commands
    state.protected = placement
    members = assignment.members
    keepers = tuple(
        tuple(state.keepers[node] for node in placement.get(worker, ())) for worker in members
    )
    return [*commands, Protect(state.generation, members, keepers)]


def _forget(state: CoreState, generation: int) -> list[Command]:
    if not state.keepers:
        return []
    return [ForgetSnapshots(generation, tuple(sorted(state.keepers)))]
