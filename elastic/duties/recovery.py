"""Recovery by one rule: take the newest step whose holdings together cover every region.

This module turns what the core knows into holdings for that rule: live workers, snapshots,
checkpoints, and the initial state, which can always be rebuilt.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field

from elastic.geometry.assignment import Assignment
from elastic.geometry.errors import Infeasible
from elastic.protocol.controller_state import ControllerState
from elastic.protocol.duty_records import HeldState
from elastic.reshard.holdings import (
    Holding,
    SourceChoice,
    Tier,
    choose,
    substitute_specs,
    uncovered,
)
from elastic.reshard.reshard_plan import ParityMembers
from elastic.reshard.snapshot_placement import ParitySlot, Slot

INITIAL_STEP = 0
PARITY = ""
"""The holder of a snapshot rebuilt from parity; a node's name is never empty."""


@dataclass(frozen=True, slots=True)
class StateSource:
    """Where the next generation's state comes from: `live`, `snapshot`, `checkpoint` or `initial`.

    `old`, for the first two, is the assignment of the state. `holders` are the live members that
    have their parts, `snapshots` the nodes whose snapshot servers have the parts of others, and
    `remade` the sources from which the rest is rebuilt. `path` is set for a checkpoint.
    """

    kind: str
    step: int
    old: Assignment | None = None
    holders: frozenset[str] = frozenset()
    snapshots: dict[str, list[str]] = field(default_factory=dict)
    remade: dict[str, ParityMembers] = field(default_factory=dict)
    path: str = ""


def choose_source(state: ControllerState) -> StateSource:
    """The source of the next generation's state.

    Live workers hold the committed step, and nothing else is newer: if they cover the state, they
    are the newest holdings. Otherwise the rule decides.
    """
    held = find_live_state(state)
    if held:
        return StateSource("live", state.committed_step, held.assignment, frozenset(held.holders))
    choice = choose(
        None, [*_live_holdings(state), *_snapshot_holdings(state), *_checkpoint_holdings(state)]
    )
    assert not isinstance(choice, Infeasible), "the initial state is always there"
    if choice.tier is Tier.SNAPSHOT:
        return _out_of_snapshots(state, choice)
    if choice.tier is Tier.CHECKPOINT:
        return StateSource("checkpoint", choice.step, path=choice.holdings[0].holder)
    return StateSource("initial", choice.step)


def find_live_state(state: ControllerState, without: Set[str] = frozenset()) -> HeldState | None:
    """The live holdings that together have all of the state, also without some workers; None if
    none do."""
    return next((held for held in state.live.holdings() if _covers(held, without)), None)


def _covers(held: HeldState, without: Set[str]) -> bool:
    layout, present = held.assignment.layout, held.holders - without
    ranks = (rank for rank, worker in enumerate(held.assignment.members) if worker in present)
    return uncovered(substitute_specs(layout), layout, ranks) is None


def _out_of_snapshots(state: ControllerState, choice: SourceChoice) -> StateSource:
    """The source that combines snapshots with live parts; no snapshot of a live part is read."""
    generation = choice.holdings[0].generation
    [old] = [s.assignment for s in state.snapshots.sets if s.assignment.generation == generation]
    member = {
        holding: old.members[old.layout.world_rank(holding.coordinates)]
        for holding in choice.holdings
    }
    alive = frozenset(member[h] for h in choice.holdings if h.tier is Tier.LIVE)
    snapshots: dict[str, list[str]] = {}
    remade: dict[str, ParityMembers] = {}
    recovered = bring_back(state.snapshots.slots, state.snapshots.parities)
    for holding in choice.holdings:
        worker = member[holding]
        if worker in alive:
            continue
        if holding.holder == PARITY:
            remade[worker] = recovered[Slot(worker, generation, choice.step)]
        else:
            snapshots.setdefault(worker, []).append(holding.holder)
    return StateSource("snapshot", choice.step, old, alive, snapshots, remade)


def bring_back(
    slots: Mapping[str, Sequence[Slot]], parities: Mapping[str, Sequence[ParitySlot]]
) -> dict[Slot, ParityMembers]:
    """The snapshots that no server holds but that can be rebuilt: all other members of the set have
    theirs, with a parity beside each.

    `slots` and `parities` say, by node, what the snapshot servers hold. The result maps each
    snapshot to its sources.
    """
    nodes: dict[tuple[tuple[str, ...], int, int], dict[str, str]] = {}
    known = {slot for node in slots for slot in slots[node]}
    for node in sorted(parities):
        for parity in parities[node]:
            if Slot(parity.member, parity.generation, parity.step) in slots.get(node, ()):
                key = (parity.members, parity.generation, parity.step)
                nodes.setdefault(key, {})[parity.member] = node
    rebuilt: dict[Slot, ParityMembers] = {}
    for (members, generation, step), present in nodes.items():
        missing = [Slot(w, generation, step) for w in members if w not in present]
        if len(missing) == 1 and missing[0] not in known:
            rebuilt[missing[0]] = tuple((worker, present.get(worker, "")) for worker in members)
    return rebuilt


def _live_holdings(state: ControllerState) -> Iterator[Holding]:
    """The parts of live workers, even if these do not cover the state alone."""
    for held in state.live.holdings():
        for rank, worker in enumerate(held.assignment.members):
            if worker in held.holders:
                step = state.committed_step
                yield _holding(state, held.assignment, rank, worker, Tier.LIVE, step)


def _snapshot_holdings(state: ControllerState) -> Iterator[Holding]:
    """The snapshots of this lineage that servers have reported, or that can be rebuilt from parity.

    If a snapshot of a step exists, that step has committed, even if the controller does not know of
    it.
    """
    snapshot_sets = {
        snapshot_set.assignment.generation: snapshot_set for snapshot_set in state.snapshots.sets
    }
    ranks = {
        generation: {worker: rank for rank, worker in enumerate(snapshot_set.assignment.members)}
        for generation, snapshot_set in snapshot_sets.items()
    }
    recovered = {PARITY: tuple(bring_back(state.snapshots.slots, state.snapshots.parities))}
    for holder, slots in (*sorted(state.snapshots.slots.items()), *recovered.items()):
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
    state: ControllerState,
    assignment: Assignment,
    world_rank: int,
    holder: str,
    tier: Tier,
    step: int,
) -> Holding:
    generation, layout = assignment.generation, assignment.layout
    coordinates = layout.coordinates(world_rank)
    return Holding(holder, tier, state.lineage, step, generation, layout, coordinates)


def _checkpoint_holdings(state: ControllerState) -> Iterator[Holding]:
    """The initial state and the saved checkpoints."""
    yield Holding("initial", Tier.INITIAL, 0, INITIAL_STEP, 0)
    for saved in state.checkpoints.saved:
        yield Holding(saved.path, Tier.CHECKPOINT, state.lineage, saved.step, saved.generation)
