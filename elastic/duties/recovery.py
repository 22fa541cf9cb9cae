"""Recovery is one rule: the newest step whose holdings, together, cover every region.

This is where the core's own knowledge becomes holdings for that rule: who lives, what keepers
have, what is saved, and that the initial state can always be made again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field

from elastic.geometry.assignment import Assignment
from elastic.geometry.errors import Infeasible
from elastic.protocol.controller_state import CoreState, HeldState
from elastic.reshard.holdings import Holding, SourceChoice, Tier, any_state, choose, uncovered
from elastic.reshard.reshard_plan import Keepings
from elastic.reshard.snapshot_placement import ParitySlot, Slot

INITIAL_STEP = 0
PARITY = ""
"""The holder of what is remade; a node's name is not empty."""


@dataclass(frozen=True, slots=True)
class StateSource:
    """Where the next generation's state comes from: `live`, `snapshot`, `checkpoint` or `initial`.

    `old` is told of the first two: `holders` are living members that have their parts,
    `snapshots` the nodes at whose keepers those of others are, `remade` of what the rest is made
    again. `path` is told of a checkpoint.
    """

    kind: str
    step: int
    old: Assignment | None = None
    holders: frozenset[str] = frozenset()
    snapshots: dict[str, list[str]] = field(default_factory=dict)
    remade: dict[str, Keepings] = field(default_factory=dict)
    path: str = ""


def choose_source(state: CoreState) -> StateSource:
    """What the next generation is made from.

    The living stand at the committed step, and nothing else is newer: where they cover the state
    they are the newest holdings. Else the rule decides.
    """
    held = living(state)
    if held:
        return StateSource("live", state.committed_step, held.assignment, frozenset(held.holders))
    choice = choose(None, [*_standing(state), *_kept(state), *_lasting(state)])
    assert not isinstance(choice, Infeasible), "the initial state is always there"
    if choice.tier is Tier.SNAPSHOT:
        return _out_of_snapshots(state, choice)
    if choice.tier is Tier.CHECKPOINT:
        return StateSource("checkpoint", choice.step, path=choice.holdings[0].holder)
    return StateSource("initial", choice.step)


def living(state: CoreState, without: Set[str] = frozenset()) -> HeldState | None:
    """The live holdings that have all of the state between them, also without some workers."""
    return next((held for held in state.holdings() if _covers(held, without)), None)


def _covers(held: HeldState, without: Set[str]) -> bool:
    layout, there = held.assignment.layout, held.holders - without
    ranks = (rank for rank, worker in enumerate(held.assignment.members) if worker in there)
    return uncovered(any_state(layout), layout, ranks) is None


def _out_of_snapshots(state: CoreState, choice: SourceChoice) -> StateSource:
    """Of a part that lives no snapshot is read."""
    generation = choice.holdings[0].generation
    [old] = [s.assignment for s in state.snapshot_sets if s.assignment.generation == generation]
    member = {
        holding: old.members[old.layout.world_rank(holding.coordinates)]
        for holding in choice.holdings
    }
    alive = frozenset(member[h] for h in choice.holdings if h.tier is Tier.LIVE)
    snapshots: dict[str, list[str]] = {}
    remade: dict[str, Keepings] = {}
    brought_back = bring_back(state.slots, state.parities)
    for holding in choice.holdings:
        worker = member[holding]
        if worker in alive:
            continue
        if holding.holder == PARITY:
            remade[worker] = brought_back[Slot(worker, generation, choice.step)]
        else:
            snapshots.setdefault(worker, []).append(holding.holder)
    return StateSource("snapshot", choice.step, old, alive, snapshots, remade)


def bring_back(
    slots: Mapping[str, Sequence[Slot]], parities: Mapping[str, Sequence[ParitySlot]]
) -> dict[Slot, Keepings]:
    """The snapshots that no keeper has, but that can be made again: all but one of a set have
    theirs, and the parity of the others beside it. By node, what keepers have."""
    nodes: dict[tuple[tuple[str, ...], int, int], dict[str, str]] = {}
    known = {slot for node in slots for slot in slots[node]}
    for node in sorted(parities):
        for parity in parities[node]:
            if Slot(parity.member, parity.generation, parity.step) in slots.get(node, ()):
                key = (parity.members, parity.generation, parity.step)
                nodes.setdefault(key, {})[parity.member] = node
    found: dict[Slot, Keepings] = {}
    for (members, generation, step), there in nodes.items():
        lost = [Slot(w, generation, step) for w in members if w not in there]
        if len(lost) == 1 and lost[0] not in known:
            found[lost[0]] = tuple((worker, there.get(worker, "")) for worker in members)
    return found


def _standing(state: CoreState) -> Iterator[Holding]:
    """The living, though they may not cover the state alone."""
    for held in state.holdings():
        for rank, worker in enumerate(held.assignment.members):
            if worker in held.holders:
                step = state.committed_step
                yield _holding(state, held.assignment, rank, worker, Tier.LIVE, step)


def _kept(state: CoreState) -> Iterator[Holding]:
    """What the keepers have said that they have, or that they can make again between them, as far
    as it is of this history. A step of which there is one has committed, also if the controller
    has not heard of it."""
    snapshot_sets = {
        snapshot_set.assignment.generation: snapshot_set for snapshot_set in state.snapshot_sets
    }
    ranks = {
        generation: {worker: rank for rank, worker in enumerate(snapshot_set.assignment.members)}
        for generation, snapshot_set in snapshot_sets.items()
    }
    brought_back = {PARITY: tuple(bring_back(state.slots, state.parities))}
    for holder, slots in (*sorted(state.slots.items()), *brought_back.items()):
        for slot in slots:
            rank = ranks.get(slot.generation, {}).get(slot.worker)
            if rank is None:
                continue
            snapshot_set = snapshot_sets[slot.generation]
            if snapshot_set.newest_step is None or slot.step <= snapshot_set.newest_step:
                yield _holding(
                    state, snapshot_set.assignment, rank, holder, Tier.SNAPSHOT, slot.step
                )


def _holding(
    state: CoreState, assignment: Assignment, world_rank: int, holder: str, tier: Tier, step: int
) -> Holding:
    generation, layout = assignment.generation, assignment.layout
    coordinates = layout.coordinates(world_rank)
    return Holding(holder, tier, state.lineage, step, generation, layout, coordinates)


def _lasting(state: CoreState) -> Iterator[Holding]:
    yield Holding("anybody", Tier.INITIAL, 0, INITIAL_STEP, 0)
    for saved in state.saved:
        yield Holding(saved.path, Tier.CHECKPOINT, state.lineage, saved.step, saved.generation)
