"""Assignments from random members, previous assignments and topologies (invariants 1 and 2)."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from random import Random
from typing import NamedTuple

from geometry_strategies import profile
from hypothesis import assume, given
from hypothesis import strategies as st

from elastic.geometry.assignment import Assignment
from elastic.geometry.errors import Infeasible
from elastic.geometry.layout import Layout
from elastic.geometry.target_layout import TargetLayout
from elastic.geometry.topology import Place
from elastic.geometry.training_job import Job
from elastic.planner.proposal import assign

NAMES = [f"w{i:02}" for i in range(24)]


class Case(NamedTuple):
    """The surviving members of an earlier assignment, and new workers, on a few nodes."""

    previous: Assignment | None
    members: tuple[str, ...]
    target_layout: TargetLayout
    topology: dict[str, Place]
    job: Job

    def assign(self, members: tuple[str, ...] | None = None) -> Assignment | Infeasible:
        return assign(
            self.previous,
            members or self.members,
            generation=2,
            target_layout=self.target_layout,
            topology=self.topology,
            job=self.job,
        )


@st.composite
def cases(draw: st.DrawFn, tps: tuple[int, ...] = (1, 2, 3)) -> Case:
    tp, pp = draw(st.sampled_from(tps)), draw(st.sampled_from([1, 1, 2]))
    num_data = len(NAMES) // (tp * pp)
    fsdp = draw(st.integers(1, min(num_data, 4)))
    dp = draw(st.integers(1, num_data // fsdp))
    memory = draw(st.sampled_from([0, 0, fsdp]))
    job = Job(num_microbatches=draw(st.sampled_from([24, 48, 7])), state_bytes=memory)
    random = Random(draw(st.integers(0, 999)))
    topology = {
        name: Place(f"n{node}", f"r{node % 2}")
        for name, node in zip(NAMES, random.choices(range(5), k=len(NAMES)), strict=True)
    }
    names = random.sample(NAMES, len(NAMES))
    target_layout = TargetLayout(pp=pp, tp=tp)
    if draw(st.booleans()):
        target_layout = replace(target_layout, dp=dp, fsdp=fsdp)
    layout = target_layout.layout(dp, fsdp)
    num_members = layout.num_workers
    previous = Assignment(1, layout, tuple(names[:num_members]))
    dead_workers = set(draw(st.lists(st.sampled_from(NAMES), max_size=8)))
    num_joiners = draw(st.integers(0, len(NAMES) - num_members))
    available = [name for name in names[: num_members + num_joiners] if name not in dead_workers]
    return Case(
        draw(st.sampled_from([previous, previous, None])),
        tuple(available),
        target_layout,
        topology,
        job,
    )


def assign_case(case: Case) -> Assignment:
    assignment = case.assign()
    assume(isinstance(assignment, Assignment))
    assert isinstance(assignment, Assignment)
    return assignment


@profile(120)
@given(cases(), st.integers())
def test_assignment_depends_on_the_set_of_members_not_on_their_order(case: Case, seed: int) -> None:
    shuffled = list(case.members)
    Random(seed).shuffle(shuffled)
    assume(case.members)
    topology = {name: case.topology[name] for name in shuffled}
    assert case._replace(topology=topology).assign(tuple(shuffled)) == case.assign()


@profile(120)
@given(cases())
def test_every_member_has_one_world_rank_or_is_a_standby_worker(case: Case) -> None:
    assignment = assign_case(case)
    assert sorted(assignment.members + assignment.standbys) == sorted(case.members)
    assert assignment.standbys == tuple(sorted(assignment.standbys))
    ranks = [assignment.world_rank(worker) for worker in assignment.members]
    assert ranks == list(range(assignment.layout.num_workers))


@profile(120)
@given(cases())
def test_same_members_keep_their_ranks(case: Case) -> None:
    first = assign_case(case)
    second = case._replace(previous=first).assign()
    assert isinstance(second, Assignment)
    assert second == first


@profile(120)
@given(cases(tps=(1,)))
def test_survivor_keeps_its_coordinates_under_the_same_shards(case: Case) -> None:
    assignment, previous = assign_case(case), case.previous
    assume(previous and _has_same_shards(previous, assignment))
    assert previous is not None
    for worker in case.members:
        if worker in previous.members:
            place = previous.coordinates(worker)
            if place.dp < assignment.layout.dp:
                assert assignment.coordinates(worker) == place


def _has_same_shards(previous: Assignment, assignment: Assignment) -> bool:
    old, new = previous.layout, assignment.layout
    return (old.pp, old.fsdp, old.tp) == (new.pp, new.fsdp, new.tp)


@profile(120)
@given(cases(tps=(1,)))
def test_as_many_shards_as_possible_stay_in_place(case: Case) -> None:
    assignment, previous = assign_case(case), case.previous
    assume(previous and _has_same_shards(previous, assignment))
    assert previous is not None
    survivors = [w for w in case.members if w in previous.members]
    holders_before = Counter(previous.coordinates(w)._replace(dp=0) for w in survivors)
    holders_that_stayed = Counter(
        previous.coordinates(w)._replace(dp=0)
        for w in survivors
        if w in assignment.members
        and assignment.coordinates(w)._replace(dp=0) == previous.coordinates(w)._replace(dp=0)
    )
    for shard, num_holders in holders_before.items():
        assert holders_that_stayed[shard] == min(num_holders, assignment.layout.dp)


@profile(120)
@given(cases())
def test_tp_group_crosses_nodes_only_if_no_assignment_avoids_it(case: Case) -> None:
    assignment = assign_case(case)
    tp = assignment.layout.tp
    num_workers_by_node = Counter(case.topology[worker].node for worker in case.members)
    num_whole = sum(n // tp for n in num_workers_by_node.values())
    nodes = [
        {case.topology[assignment.members[rank]].node for rank in group}
        for group in assignment.layout.groups("tp")
    ]
    num_crossing = sum(len(group_nodes) > 1 for group_nodes in nodes)
    assert num_crossing == max(0, len(nodes) - num_whole)


@profile(120)
@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.integers(0, 5), st.data())
def test_replicas_of_a_shard_are_on_different_nodes_if_there_are_enough(
    dp: int, fsdp: int, num_racks: int, num_extra_nodes: int, data: st.DataObject
) -> None:
    topology = {
        f"n{node}-{slot}": Place(f"n{node}", f"r{node % num_racks}")
        for node in range(dp + num_extra_nodes)
        for slot in range(fsdp + node % 2)
    }
    target_layout, job = TargetLayout(dp=dp, fsdp=fsdp), Job(num_microbatches=16)
    first = assign(
        None, topology, generation=1, target_layout=target_layout, topology=topology, job=job
    )
    assert isinstance(first, Assignment)
    assert _num_nodes_per_shard(first, topology) == [dp] * fsdp
    if num_extra_nodes:
        lost_worker = data.draw(st.sampled_from(first.members))
        survivors = [worker for worker in topology if worker != lost_worker]
        second = assign(
            first, survivors, generation=2, target_layout=target_layout, topology=topology, job=job
        )
        assert isinstance(second, Assignment)
        assert _num_nodes_per_shard(second, topology) == [dp] * fsdp


@profile(400)
@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.integers(0, 3), st.data())
def test_new_replicas_avoid_nodes_that_hold_the_shard_whatever_the_sizes_of_racks(
    dp: int, num_new: int, fsdp: int, num_more: int, data: st.DataObject
) -> None:
    """Any nodes of racks of any sizes hold the first replicas, and have a worker to spare."""
    nodes = range(dp + num_new + num_more)
    racks = data.draw(st.lists(st.integers(0, 3), min_size=len(nodes), max_size=len(nodes)))
    topology = {
        f"n{node}-{slot}": Place(f"n{node}", f"r{racks[node]}")
        for node in nodes
        for slot in range(fsdp + data.draw(st.integers(0, fsdp)))
    }
    holding = data.draw(st.permutations(nodes))[:dp]
    members = tuple(f"n{node}-{slot}" for node in holding for slot in range(fsdp))
    previous = Assignment(1, Layout(dp=dp, fsdp=fsdp), members)
    grown = assign(
        previous,
        topology,
        generation=2,
        target_layout=TargetLayout(dp=dp + num_new, fsdp=fsdp),
        topology=topology,
        job=Job(num_microbatches=64),
    )
    assert isinstance(grown, Assignment)
    assert grown.layout.dp == dp + num_new
    assert _num_nodes_per_shard(grown, topology) == [dp + num_new] * fsdp


def _num_nodes_per_shard(assignment: Assignment, topology: dict[str, Place]) -> list[int]:
    groups = assignment.layout.groups("dp")
    return [len({topology[assignment.members[rank]].node for rank in g}) for g in groups]


@profile(120)
@given(cases(), st.booleans())
def test_no_feasible_layout_is_better_than_the_planned_one(
    case: Case, snapshots_cover: bool
) -> None:
    case = case._replace(
        target_layout=replace(case.target_layout, dp=None, fsdp=None), previous=None
    )
    memory_bytes = 1 if case.job.state_bytes else None
    job = replace(case.job, margin=1.0)
    assignment = assign(
        None,
        case.members,
        generation=1,
        target_layout=case.target_layout,
        topology=case.topology,
        job=job,
        memory_bytes=memory_bytes,
        snapshots_cover=snapshots_cover,
    )
    feasible = [
        (dp, fsdp)
        for dp in range(1, len(NAMES) + 1)
        for fsdp in range(1, len(NAMES) + 1)
        if case.target_layout.layout(dp, fsdp).num_workers <= len(case.members)
        and dp * fsdp <= job.num_microbatches
        and (
            memory_bytes is None
            or job.state_bytes <= fsdp * case.target_layout.pp * case.target_layout.tp
        )
    ]
    if isinstance(assignment, Infeasible):
        assert not feasible
        return
    layout = assignment.layout
    if not feasible:
        assert (layout.pp, layout.tp) != (case.target_layout.pp, case.target_layout.tp)
        return
    if not snapshots_cover and any(dp > 1 for dp, _ in feasible):
        feasible = [(dp, fsdp) for dp, fsdp in feasible if dp > 1]
    cost = {
        (dp, fsdp): max(-(-job.num_microbatches // (dp * fsdp)), layout.pp) + layout.pp - 1
        for dp, fsdp in feasible
    }
    fastest = [pair for pair in feasible if cost[pair] <= 1.05 * min(cost.values())]
    assert (layout.dp, layout.fsdp) in fastest
    assert layout.dp == max(dp for dp, _ in fastest)


SAME_UNDER_ANY_SEED = """
from elastic.geometry.training_job import Job
from elastic.geometry.topology import Place
from elastic.geometry.target_layout import TargetLayout
from elastic.planner.proposal import assign
from elastic.geometry.assignment import Assignment
from elastic.geometry.layout import Layout

workers = {f"w{i}" for i in range(4, 40)}
topology = {w: Place(f"n{int(w[1:]) // 5}", f"r{int(w[1:]) // 20}") for w in workers}
old = Assignment(1, Layout(dp=4, fsdp=3, tp=2), tuple(f"w{i}" for i in range(24)))
for target in (TargetLayout(tp=2), TargetLayout(tp=2, dp=4, fsdp=4), TargetLayout(dp=3, fsdp=7)):
    for previous in (None, old):
        print(assign(previous, workers, generation=2, target_layout=target, topology=topology,
                     job=Job(num_microbatches=64)))
"""


def test_assignments_do_not_depend_on_the_hash_seed() -> None:
    outputs = [
        subprocess.run(
            [sys.executable, "-c", SAME_UNDER_ANY_SEED],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert outputs[0] == outputs[1]
    assert outputs[0].count("Assignment") == 6
