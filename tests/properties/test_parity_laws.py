"""Snapshot sets, chunks and parities against brute force: a lost part is recovered bit by bit."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

from geometry_strategies import layouts, profile
from hypothesis import given
from hypothesis import strategies as st

from elastic.duties.recovery import bring_back
from elastic.geometry.assignment import Assignment
from elastic.geometry.layout import Layout
from elastic.geometry.topology import Place
from elastic.reshard.holdings import substitute_specs, uncovered
from elastic.reshard.parity import (
    ALIGNED_BYTES,
    chunk_size,
    chunk_within,
    make_sets,
    reads_for,
)
from elastic.reshard.snapshot_placement import (
    ParitySlot,
    Placement,
    Slot,
    choose_carriers,
    place_snapshots,
    shortfall,
)

num_workers_by_domain = st.dictionaries(st.sampled_from("abcdefgh"), st.integers(0, 6), max_size=8)


def parity_at(parts: list[bytes], snapshot_server: int) -> bytes:
    """The parity at the snapshot server of a member, computed byte by byte."""
    parity = bytearray(chunk_size([len(part) for part in parts]))
    for member in range(len(parts)):
        if member != snapshot_server:
            chunk = chunk_within([len(part) for part in parts], member, snapshot_server)
            for offset, byte in enumerate(parts[member][chunk.start : chunk.stop]):
                parity[offset] ^= byte
    return bytes(parity)


@profile(100)
@given(st.lists(st.binary(min_size=1, max_size=900), min_size=2, max_size=6), st.data())
def test_any_single_part_is_recovered_from_the_others(
    parts: list[bytes], data: st.DataObject
) -> None:
    sizes = [len(part) for part in parts]
    lost_member = data.draw(st.sampled_from(range(len(parts))))
    recovered = bytearray(sizes[lost_member])
    for read in reads_for(sizes, lost_member):
        assert read.member != lost_member
        source = parity_at(parts, read.member) if read.is_parity else parts[read.member]
        chunk = source[read.begin : read.begin + read.num_bytes]
        assert len(chunk) == read.num_bytes
        for offset, byte in enumerate(chunk):
            recovered[read.into + offset] ^= byte
    assert bytes(recovered) == parts[lost_member]


@profile(100)
@given(st.lists(st.integers(0, 10**9), min_size=2, max_size=9))
def test_each_byte_is_sent_once_and_parity_has_a_kth_of_the_largest_part(sizes: list[int]) -> None:
    members = range(len(sizes))
    for member in members:
        chunks = sorted(
            (
                chunk_within(sizes, member, snapshot_server)
                for snapshot_server in members
                if snapshot_server != member
            ),
            key=lambda chunk: chunk.start,
        )
        assert chunks[0].start == 0
        assert chunks[-1].stop == sizes[member]
        assert all(a.stop == b.start for a, b in pairwise(chunks))
    num_chunks = len(sizes) - 1
    assert chunk_size(sizes) * num_chunks - max(sizes) < num_chunks * ALIGNED_BYTES


@profile(150)
@given(num_workers_by_domain, st.integers(1, 5), st.randoms(use_true_random=False))
def test_sets_span_different_domains_and_use_all_members_that_they_can(
    counts: dict[str, int], num_chunks: int, random: object
) -> None:
    by_domain = {d: [f"{d}{i}" for i in range(n)] for d, n in counts.items()}
    sets = make_sets(by_domain, num_chunks)
    used = Counter(worker for workers in sets for worker in workers)
    assert all(count == 1 for count in used.values())
    for workers in sets:
        assert len({worker[0] for worker in workers}) == len(workers)
        assert 3 <= len(workers) <= num_chunks + 1
    unused_domains = {d for d, workers in by_domain.items() if set(workers) - set(used)}
    assert len(unused_domains) < 3 or num_chunks < 2
    reverse = make_sets(dict(reversed(by_domain.items())), num_chunks)
    assert reverse == sets, "invariant 2: the order of arrival does not matter"


def make_even_assignment(num_nodes: int, num_per_node: int) -> tuple[Assignment, dict[str, Place]]:
    """An assignment with `fsdp` over all workers, dealt to the nodes in turn."""
    members = tuple(f"w{rank}" for rank in range(num_nodes * num_per_node))
    places = {w: Place(f"n{rank % num_nodes}") for rank, w in enumerate(members)}
    return Assignment(3, Layout(fsdp=len(members)), members), places


def reports_after_loss(
    assignment: Assignment,
    placement: Placement,
    places: dict[str, Place],
    step: int,
    dead_node: str,
) -> tuple[dict[str, tuple[Slot, ...]], dict[str, tuple[ParitySlot, ...]]]:
    """The reports of the snapshot servers after the loss of the node `dead`."""
    slots: dict[str, tuple[Slot, ...]] = {}
    parities: dict[str, tuple[ParitySlot, ...]] = {}
    for worker, nodes in placement.copies.items():
        for node in set(nodes) - {dead_node}:
            slots[node] = (*slots.get(node, ()), Slot(worker, assignment.generation, step))
    for members in placement.sets:
        for member in members:
            node = places[member].node
            if node != dead_node:
                slot = ParitySlot(members, member, assignment.generation, step)
                parities[node] = (*parities.get(node, ()), slot)
    return slots, parities


@profile(100)
@given(layouts(12), st.integers(2, 6), st.integers(1, 5), st.integers(0, 3), st.data())
def test_loss_of_any_node_leaves_the_state_covered(
    layout: Layout, num_nodes: int, num_chunks: int, num_racks: int, data: st.DataObject
) -> None:
    members = tuple(f"w{rank}" for rank in range(layout.num_workers))
    node = st.integers(0, num_nodes - 1)
    numbers = [data.draw(node) for _ in members]
    places = {
        worker: Place(f"n{number}", f"r{number % num_racks}" if num_racks else "")
        for worker, number in zip(members, numbers, strict=True)
    }
    snapshot_servers = sorted(set(places.values()))
    assignment = Assignment(3, layout, members)
    placement = place_snapshots(assignment, places, snapshot_servers, num_chunks)
    if len(snapshot_servers) < 2 or not placement.copies:
        return
    dead_node = data.draw(st.sampled_from(snapshot_servers)).node
    slots, parities = reports_after_loss(assignment, placement, places, 7, dead_node)
    recovered = bring_back(slots, parities)
    available = {slot.worker for reported in slots.values() for slot in reported}
    available |= {slot.worker for slot in recovered}
    ranks = [rank for rank, worker in enumerate(members) if worker in available]
    assert uncovered(substitute_specs(layout), layout, ranks) is None
    surviving_places = {
        worker: place for worker, place in places.items() if place.node != dead_node
    }
    if surviving_places:
        survivors = tuple(sorted(surviving_places))
        new = Assignment(4, Layout(dp=len(survivors)), survivors)
        sources_of_recovered = {slot.worker: sources for slot, sources in recovered.items()}
        for part in choose_carriers(assignment, {}, new, surviving_places, sources_of_recovered):
            assert part.carrier in surviving_places
            assert dead_node not in part.nodes


def test_set_has_one_worker_of_each_node_and_no_second_copies() -> None:
    assignment, places = make_even_assignment(num_nodes=4, num_per_node=3)
    placement = place_snapshots(assignment, places, sorted(set(places.values())), 3)
    assert len(placement.sets) == 3
    assert {len(workers) for workers in placement.sets} == {4}
    assert all(nodes == (places[w].node,) for w, nodes in placement.copies.items())


def test_two_losses_in_a_set_cannot_be_recovered() -> None:
    assignment, places = make_even_assignment(num_nodes=4, num_per_node=1)
    placement = place_snapshots(assignment, places, sorted(set(places.values())), 3)
    slots, parities = reports_after_loss(assignment, placement, places, 7, "n0")
    assert [slot.worker for slot in bring_back(slots, parities)] == ["w0"]
    for reported in (slots, parities):
        reported.pop("n1")
    assert not bring_back(slots, parities)


def test_parity_of_another_step_recovers_nothing() -> None:
    assignment, places = make_even_assignment(num_nodes=4, num_per_node=1)
    placement = place_snapshots(assignment, places, sorted(set(places.values())), 3)
    slots, parities = reports_after_loss(assignment, placement, places, 7, "n0")
    _, older = reports_after_loss(assignment, placement, places, 6, "n0")
    assert not bring_back(slots, parities | {"n2": older["n2"]})


def test_fewer_domains_make_smaller_sets_and_two_domains_make_copies() -> None:
    for num_nodes, num_members in ((3, 3), (4, 4), (6, 4)):
        assignment, places = make_even_assignment(num_nodes, num_per_node=1)
        placement = place_snapshots(assignment, places, sorted(set(places.values())), 3)
        assert len(placement.sets[0]) == num_members
    assignment, places = make_even_assignment(num_nodes=2, num_per_node=2)
    placement = place_snapshots(assignment, places, sorted(set(places.values())), 3)
    assert placement == place_snapshots(assignment, places, sorted(set(places.values())))
    assert not placement.sets


def test_shortfall_names_the_actual_redundancy() -> None:
    def reason(num_nodes: int, num_per_node: int, num_chunks: int) -> str:
        assignment, places = make_even_assignment(num_nodes, num_per_node)
        snapshot_servers = sorted(set(places.values()))
        return shortfall(
            place_snapshots(assignment, places, snapshot_servers, num_chunks), num_chunks
        )

    assert reason(4, 2, 3) == reason(2, 2, 0) == ""
    needs = "xor:3 needs 4 nodes in a set: "
    assert reason(3, 2, 3) == needs + "6 parts in smaller sets"
    assert reason(2, 2, 3) == needs + "4 parts copied whole"
    assert reason(1, 4, 3) == needs + "no snapshot on another node"
    assert reason(5, 1, 3) == needs + "1 parts copied whole"
