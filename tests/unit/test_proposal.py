"""Assignments that can be checked by eye."""

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
FOUR = ("w0", "w1", "w2", "w3")


def assigned(
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
    assignment = assigned(*args, **kwargs)  # type: ignore[arg-type]
    assert isinstance(assignment, Assignment), assignment
    return str(assignment.layout)


def reason_of(*args: object, **kwargs: object) -> str:
    refusal = assigned(*args, **kwargs)  # type: ignore[arg-type]
    assert isinstance(refusal, Infeasible), refusal
    return refusal.reason


def test_without_a_wish_all_are_replicas() -> None:
    assert assigned(FOUR, TargetLayout()) == Assignment(5, Layout(dp=4), FOUR)


def test_at_full_strength_the_wish_is_taken_and_the_rest_are_spares() -> None:
    assert assigned((*FOUR, "w4"), TargetLayout(dp=2, fsdp=2)) == Assignment(
        5, Layout(dp=2, fsdp=2), FOUR, ("w4",)
    )


def test_a_lost_replica_leaves_the_others_where_they_are() -> None:
    previous = Assignment(4, Layout(dp=4), FOUR)
    assert assigned(("w0", "w2", "w3"), TargetLayout(), previous) == Assignment(
        5, Layout(dp=3), ("w0", "w3", "w2")
    )


def test_a_joiner_takes_the_place_of_the_lost() -> None:
    previous = Assignment(4, Layout(dp=2, fsdp=2), FOUR)
    mended = assigned(("w0", "w2", "w3", "w9"), TargetLayout(dp=2, fsdp=2), previous)
    assert mended == Assignment(5, Layout(dp=2, fsdp=2), ("w0", "w9", "w2", "w3"))


def test_a_missing_worker_makes_the_data_axes_be_planned_again() -> None:
    previous = Assignment(4, Layout(dp=2, fsdp=2), FOUR)
    assert layout_of(("w0", "w2", "w3"), TargetLayout(dp=2, fsdp=2), previous) == "dp=3"
    assert layout_of(FOUR, TargetLayout(dp=2, fsdp=2)) == "dp=2,fsdp=2"


def test_memory_asks_for_shards() -> None:
    job = Job(num_microbatches=8, state_bytes=100, margin=1.2)
    assert layout_of(FOUR, TargetLayout(), job=job, memory_bytes=120) == "dp=4"
    assert layout_of(FOUR, TargetLayout(), job=job, memory_bytes=119) == "dp=2,fsdp=2"
    assert layout_of(FOUR, TargetLayout(), job=job, memory_bytes=30) == "fsdp=4"
    assert "raise fsdp" in reason_of(FOUR, TargetLayout(), job=job, memory_bytes=29)
    assert "fsdp=2" in reason_of(FOUR, TargetLayout(dp=2, fsdp=2), job=job, memory_bytes=29)


def test_zero_leaves_parameters_and_gradients_whole() -> None:
    job = Job(num_microbatches=8, state_bytes=120, param_bytes=40, margin=1.0)
    for zero, of_two, of_four in ((1, 120, 100), (2, 100, 70), (3, 80, 40)):
        target_layout = TargetLayout(zero=zero)
        told = "" if zero == 3 else f",zero={zero}"
        assert layout_of(FOUR, target_layout, job=job, memory_bytes=of_two) == f"dp=2,fsdp=2{told}"
        assert layout_of(FOUR, target_layout, job=job, memory_bytes=of_four) == f"fsdp=4{told}"
        assert "raise fsdp" in reason_of(FOUR, target_layout, job=job, memory_bytes=of_four - 1)
    assert "raise zero" in reason_of(FOUR, TargetLayout(zero=0), job=job, memory_bytes=159)


def test_one_replica_alone_is_taken_only_where_snapshots_cover() -> None:
    five = (*FOUR, "w4")
    job = Job(num_microbatches=100, state_bytes=100, margin=1.0)
    assert layout_of(five, TargetLayout(), job=job, memory_bytes=50) == "dp=2,fsdp=2"
    quick = layout_of(five, TargetLayout(), job=job, memory_bytes=50, snapshots_cover=True)
    assert quick == "fsdp=5"


def test_no_more_data_ranks_than_microbatches() -> None:
    few = Job(num_microbatches=3)
    assert assigned(FOUR, TargetLayout(), job=few) == Assignment(5, Layout(dp=3), FOUR[:3], ("w3",))
    assert "3 microbatches" in reason_of(FOUR, TargetLayout(dp=4), job=few)


def test_too_few_workers_for_the_model_axes_is_told() -> None:
    assert "need at least 8 workers" in reason_of(FOUR, TargetLayout(pp=2, tp=4, max_workers=4))


def test_experts_ask_for_data_ranks_that_they_fold_into() -> None:
    assert layout_of(FOUR, TargetLayout(ep=2)) == "dp=2,fsdp=2,ep=2"
    assert layout_of(FOUR, TargetLayout(ep=8)) == "fsdp=4,ep=4"
    assert "divides no fsdp" in reason_of(FOUR, TargetLayout(ep=8, max_workers=4))


def test_max_workers_leaves_spares() -> None:
    assert assigned(FOUR, TargetLayout(max_workers=2)) == Assignment(
        5, Layout(dp=2), FOUR[:2], FOUR[2:]
    )


def test_among_equal_layouts_the_one_that_moves_less_is_taken() -> None:
    eleven = tuple(f"w{i:02}" for i in range(11))
    job = Job(num_microbatches=16, state_bytes=4, margin=1.0)
    for fsdp in (4, 5):
        previous = Assignment(4, Layout(dp=2, fsdp=fsdp), eleven[: 2 * fsdp])
        planned = layout_of(eleven, TargetLayout(), previous, job=job, memory_bytes=1)
        assert planned == f"dp=2,fsdp={fsdp}"


def test_a_tp_group_that_its_node_cannot_complete_moves_away() -> None:
    topology = {worker: Place(worker[0]) for worker in ("a0", "a1", "b0", "b1", "c0", "c1")}
    target_layout = TargetLayout(tp=2, dp=2)
    first = assigned(("a0", "a1", "b0", "b1"), target_layout, topology=topology)
    assert first == Assignment(5, Layout(dp=2, tp=2), ("a0", "a1", "b0", "b1"))
    moved = assigned(("a0", "b0", "b1", "c0", "c1"), target_layout, first, topology)
    assert moved == Assignment(5, Layout(dp=2, tp=2), ("c0", "c1", "b0", "b1"), ("a0",))
    crossing = assigned(("a0", "b0", "b1", "c0"), target_layout, first, topology)
    assert crossing == Assignment(5, Layout(dp=2, tp=2), ("a0", "c0", "b0", "b1"))


def test_replicas_go_to_different_racks_and_each_stays_on_its_node() -> None:
    topology = {
        f"{rack}{node}{slot}": Place(f"{rack}{node}", rack)
        for rack, node, slot in product("ab", range(2), range(2))
    }
    two = assigned(tuple(topology), TargetLayout(dp=2, fsdp=2), topology=topology)
    assert isinstance(two, Assignment)
    assert two.members == ("a00", "a01", "b00", "b01")


def test_shards_stay_where_they_overlap_when_fsdp_changes() -> None:
    previous = Assignment(4, Layout(dp=2, fsdp=2), FOUR)
    wider = assigned(FOUR, TargetLayout(dp=1, fsdp=4), previous)
    assert wider == Assignment(5, Layout(fsdp=4), ("w2", "w0", "w3", "w1"))
    many = tuple(f"w{7 - i}" for i in range(8))
    widest = assigned(many, TargetLayout(fsdp=8), Assignment(4, Layout(dp=2, fsdp=4), many))
    assert isinstance(widest, Assignment)
    assert [many.index(worker) % 4 for worker in widest.members] == [0, 0, 1, 1, 2, 2, 3, 3]


def test_groups_that_must_cross_nodes_stay_as_they_were() -> None:
    topology = {worker: Place(worker) for worker in FOUR}
    previous = Assignment(4, Layout(dp=2, tp=2), ("w3", "w0", "w2", "w1"))
    again = assigned(FOUR, TargetLayout(dp=2, tp=2), previous, topology)
    assert again == Assignment(5, Layout(dp=2, tp=2), previous.members)


def test_a_wish_is_read_from_the_layout_of_the_command_line() -> None:
    assert TargetLayout.parse("dp=2,tp=2") == TargetLayout(tp=2, dp=2)
    assert TargetLayout.parse("tp=2", 8) == TargetLayout(tp=2, max_workers=8)
    assert TargetLayout.parse("") == TargetLayout()
    assert TargetLayout.parse("fsdp=2").data_axes == (1, 2)
    with pytest.raises(InvalidLayout):
        TargetLayout.parse("dp=two")
