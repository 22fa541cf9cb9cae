"""Assignments on small cases that can be checked by hand."""

from __future__ import annotations

from itertools import product

import pytest

from elastic.geometry.assignment import Assignment
from elastic.geometry.errors import Infeasible, InvalidLayout
from elastic.geometry.layout import Layout
from elastic.geometry.target_layout import TargetLayout
from elastic.geometry.topology import Place
from elastic.geometry.training_job import Job
from elastic.planner.proposal import assign

JOB = Job(num_microbatches=8)
WORKERS = ("w0", "w1", "w2", "w3")


def propose(
    members: tuple[str, ...],
    target_layout: TargetLayout,
    previous: Assignment | None = None,
    topology: dict[str, Place] | None = None,
    job: Job = JOB,
    memory_bytes: int | None = None,
    snapshots_cover: bool = False,
) -> Assignment | Infeasible:
    return assign(
        previous,
        members,
        generation=5,
        target_layout=target_layout,
        topology=topology or {},
        job=job,
        memory_bytes=memory_bytes,
        snapshots_cover=snapshots_cover,
    )


def layout_of(*args: object, **kwargs: object) -> str:
    assignment = propose(*args, **kwargs)  # type: ignore[arg-type]
    assert isinstance(assignment, Assignment), assignment
    return str(assignment.layout)


def reason_of(*args: object, **kwargs: object) -> str:
    refusal = propose(*args, **kwargs)  # type: ignore[arg-type]
    assert isinstance(refusal, Infeasible), refusal
    return refusal.reason


def test_workers_without_a_target_layout_are_replicas() -> None:
    assert propose(WORKERS, TargetLayout()) == Assignment(5, Layout(dp=4), WORKERS)


def test_full_capacity_takes_the_target_layout_and_leaves_standby_workers() -> None:
    assert propose((*WORKERS, "w4"), TargetLayout(dp=2, fsdp=2)) == Assignment(
        5, Layout(dp=2, fsdp=2), WORKERS, ("w4",)
    )


def test_loss_of_a_replica_keeps_most_ranks() -> None:
    previous = Assignment(4, Layout(dp=4), WORKERS)
    assert propose(("w0", "w2", "w3"), TargetLayout(), previous) == Assignment(
        5, Layout(dp=3), ("w0", "w3", "w2")
    )


def test_joining_worker_takes_the_rank_of_the_lost_one() -> None:
    previous = Assignment(4, Layout(dp=2, fsdp=2), WORKERS)
    assignment = propose(("w0", "w2", "w3", "w9"), TargetLayout(dp=2, fsdp=2), previous)
    assert assignment == Assignment(5, Layout(dp=2, fsdp=2), ("w0", "w9", "w2", "w3"))


def test_missing_worker_changes_the_data_axes() -> None:
    previous = Assignment(4, Layout(dp=2, fsdp=2), WORKERS)
    assert layout_of(("w0", "w2", "w3"), TargetLayout(dp=2, fsdp=2), previous) == "dp=3"
    assert layout_of(WORKERS, TargetLayout(dp=2, fsdp=2)) == "dp=2,fsdp=2"


def test_less_memory_leads_to_more_shards() -> None:
    job = Job(num_microbatches=8, state_bytes=100, margin=1.2)
    assert layout_of(WORKERS, TargetLayout(), job=job, memory_bytes=120) == "dp=4"
    assert layout_of(WORKERS, TargetLayout(), job=job, memory_bytes=119) == "dp=2,fsdp=2"
    assert layout_of(WORKERS, TargetLayout(), job=job, memory_bytes=30) == "fsdp=4"
    assert "raise fsdp" in reason_of(WORKERS, TargetLayout(), job=job, memory_bytes=29)
    assert "fsdp=2" in reason_of(WORKERS, TargetLayout(dp=2, fsdp=2), job=job, memory_bytes=29)


def test_zero_stage_determines_the_memory_that_shards_save() -> None:
    job = Job(num_microbatches=8, state_bytes=120, param_bytes=40, margin=1.0)
    for zero, bytes_for_two, bytes_for_four in ((1, 120, 100), (2, 100, 70), (3, 80, 40)):
        target_layout = TargetLayout(zero=zero)
        suffix = "" if zero == 3 else f",zero={zero}"
        assert (
            layout_of(WORKERS, target_layout, job=job, memory_bytes=bytes_for_two)
            == f"dp=2,fsdp=2{suffix}"
        )
        assert (
            layout_of(WORKERS, target_layout, job=job, memory_bytes=bytes_for_four)
            == f"fsdp=4{suffix}"
        )
        assert "raise fsdp" in reason_of(
            WORKERS, target_layout, job=job, memory_bytes=bytes_for_four - 1
        )
    assert "raise zero" in reason_of(WORKERS, TargetLayout(zero=0), job=job, memory_bytes=159)


def test_single_replica_is_chosen_only_if_snapshots_cover_it() -> None:
    five = (*WORKERS, "w4")
    job = Job(num_microbatches=100, state_bytes=100, margin=1.0)
    assert layout_of(five, TargetLayout(), job=job, memory_bytes=50) == "dp=2,fsdp=2"
    single_replica = layout_of(five, TargetLayout(), job=job, memory_bytes=50, snapshots_cover=True)
    assert single_replica == "fsdp=5"


def test_layout_has_no_more_data_ranks_than_microbatches() -> None:
    job = Job(num_microbatches=3)
    assert propose(WORKERS, TargetLayout(), job=job) == Assignment(
        5, Layout(dp=3), WORKERS[:3], ("w3",)
    )
    assert "3 microbatches" in reason_of(WORKERS, TargetLayout(dp=4), job=job)


def test_too_few_workers_for_the_model_axes_are_refused() -> None:
    assert "need at least 8 workers" in reason_of(WORKERS, TargetLayout(pp=2, tp=4, max_workers=4))


def test_expert_parallelism_leads_to_data_ranks_that_ep_divides() -> None:
    assert layout_of(WORKERS, TargetLayout(ep=2)) == "dp=2,fsdp=2,ep=2"
    assert layout_of(WORKERS, TargetLayout(ep=8)) == "fsdp=4,ep=4"
    assert "divides no fsdp" in reason_of(WORKERS, TargetLayout(ep=8, max_workers=4))


def test_max_workers_leaves_standby_workers() -> None:
    assert propose(WORKERS, TargetLayout(max_workers=2)) == Assignment(
        5, Layout(dp=2), WORKERS[:2], WORKERS[2:]
    )


def test_among_equal_layouts_the_one_that_moves_fewest_bytes_is_chosen() -> None:
    workers = tuple(f"w{i:02}" for i in range(11))
    job = Job(num_microbatches=16, state_bytes=4, margin=1.0)
    for fsdp in (4, 5):
        previous = Assignment(4, Layout(dp=2, fsdp=fsdp), workers[: 2 * fsdp])
        planned = layout_of(workers, TargetLayout(), previous, job=job, memory_bytes=1)
        assert planned == f"dp=2,fsdp={fsdp}"


def test_tp_group_that_its_node_cannot_complete_moves_to_another_node() -> None:
    topology = {worker: Place(worker[0]) for worker in ("a0", "a1", "b0", "b1", "c0", "c1")}
    target_layout = TargetLayout(tp=2, dp=2)
    first = propose(("a0", "a1", "b0", "b1"), target_layout, topology=topology)
    assert first == Assignment(5, Layout(dp=2, tp=2), ("a0", "a1", "b0", "b1"))
    moved = propose(("a0", "b0", "b1", "c0", "c1"), target_layout, first, topology)
    assert moved == Assignment(5, Layout(dp=2, tp=2), ("c0", "c1", "b0", "b1"), ("a0",))
    crossing = propose(("a0", "b0", "b1", "c0"), target_layout, first, topology)
    assert crossing == Assignment(5, Layout(dp=2, tp=2), ("a0", "c0", "b0", "b1"))


def test_replicas_go_to_different_racks_and_each_stays_on_its_node() -> None:
    topology = {
        f"{rack}{node}{slot}": Place(f"{rack}{node}", rack)
        for rack, node, slot in product("ab", range(2), range(2))
    }
    assignment = propose(tuple(topology), TargetLayout(dp=2, fsdp=2), topology=topology)
    assert isinstance(assignment, Assignment)
    assert assignment.members == ("a00", "a01", "b00", "b01")


def test_shards_stay_on_overlapping_ranks_when_fsdp_changes() -> None:
    previous = Assignment(4, Layout(dp=2, fsdp=2), WORKERS)
    wider = propose(WORKERS, TargetLayout(dp=1, fsdp=4), previous)
    assert wider == Assignment(5, Layout(fsdp=4), ("w2", "w0", "w3", "w1"))
    workers = tuple(f"w{7 - i}" for i in range(8))
    widest = propose(workers, TargetLayout(fsdp=8), Assignment(4, Layout(dp=2, fsdp=4), workers))
    assert isinstance(widest, Assignment)
    assert [workers.index(worker) % 4 for worker in widest.members] == [0, 0, 1, 1, 2, 2, 3, 3]


def test_groups_that_must_cross_nodes_do_not_change() -> None:
    topology = {worker: Place(worker) for worker in WORKERS}
    previous = Assignment(4, Layout(dp=2, tp=2), ("w3", "w0", "w2", "w1"))
    assignment = propose(WORKERS, TargetLayout(dp=2, tp=2), previous, topology)
    assert assignment == Assignment(5, Layout(dp=2, tp=2), previous.members)


def test_target_layout_is_parsed_from_the_command_line() -> None:
    assert TargetLayout.parse("dp=2,tp=2") == TargetLayout(tp=2, dp=2)
    assert TargetLayout.parse("tp=2", 8) == TargetLayout(tp=2, max_workers=8)
    assert TargetLayout.parse("") == TargetLayout()
    assert TargetLayout.parse("fsdp=2").data_axes == (1, 2)
    with pytest.raises(InvalidLayout):
        TargetLayout.parse("dp=two")
