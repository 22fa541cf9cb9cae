"""The layout choice for random target layouts, models, memories and numbers of workers."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import NamedTuple

from geometry_strategies import profile
from hypothesis import given
from hypothesis import strategies as st

from elastic.geometry.errors import Infeasible
from elastic.geometry.layout import Layout
from elastic.geometry.model_limits import Limits
from elastic.geometry.target_layout import TargetLayout
from elastic.geometry.topology import Place
from elastic.geometry.training_job import Bandwidths, Capacity, Job
from elastic.planner.layout_choice import LayoutChoice, plan_layout
from elastic.planner.models.memory_model import worker_bytes
from elastic.planner.proposal import Proposal, propose


class Case(NamedTuple):
    """A target layout within the limits of the model, and the capacity."""

    target_layout: TargetLayout
    job: Job
    capacity: Capacity
    snapshots_cover: bool

    def plan(self, previous: Layout | None = None, **changed: int) -> LayoutChoice | Infeasible:
        capacity = replace(self.capacity, **changed)
        return plan_layout(previous, capacity, self.target_layout, self.job, self.snapshots_cover)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    degrees = st.sampled_from([1, 1, 2, 3, 4])
    pp, cp, tp = draw(degrees), draw(st.sampled_from([1, 1, 2])), draw(degrees)
    vp = draw(st.sampled_from([1, 2])) if pp > 1 else 1
    target_layout = TargetLayout(
        pp, cp, tp, draw(st.sampled_from([1, 1, 2, 4])), draw(st.integers(0, 3)), vp
    )
    if draw(st.booleans()):
        fsdp = target_layout.least_fsdp * draw(st.integers(1, 2))
        target_layout = replace(target_layout, dp=draw(st.integers(1, 3)), fsdp=fsdp)
    if draw(st.booleans()):
        num_ranks = target_layout.num_model_ranks * target_layout.least_fsdp
        fewest = num_ranks * (target_layout.dp or 1)
        target_layout = replace(target_layout, max_workers=fewest * draw(st.integers(1, 3)))
    layers = draw(st.sampled_from([(), (1,) * 8, (1, 5, 5, 5, 5, 5, 5, 9)]))
    bounded = Limits(tp_divides=12, num_layers=8, seq_len=48, num_experts=8)
    speeds = st.none() | st.sampled_from([1e3, 1e6])
    job = Job(
        num_microbatches=draw(st.integers(24, 64)),
        state_bytes=1200,
        param_bytes=draw(st.sampled_from([0, 400])),
        margin=draw(st.sampled_from([1.0, 1.2])),
        limits=draw(st.sampled_from([Limits(), bounded])),
        layer_costs=layers,
        activation_bytes=draw(st.sampled_from([0, 100])),
        microbatch_s=draw(st.sampled_from([0.0, 0.1])),
        bandwidths=Bandwidths(draw(speeds), draw(speeds), draw(speeds)),
    )
    memory_bytes = draw(st.none() | st.integers(30, 2000))
    capacity = Capacity(draw(st.integers(0, 40)), memory_bytes, draw(st.integers(1, 8)), 16)
    return Case(target_layout, job, capacity, draw(st.booleans()))


@profile(120)
@given(cases())
def test_planned_layout_respects_every_limit(case: Case) -> None:
    choice = case.plan()
    if isinstance(choice, Infeasible):
        assert choice.reason
        return
    layout, job = choice.layout, case.job
    assert choice.reason and all(choice.refusals)
    assert job.limits.refusal(layout) is None
    assert layout.num_workers <= min(
        case.capacity.num_workers, case.target_layout.max_workers or 40
    )
    assert layout.num_data_ranks <= job.num_microbatches
    assert layout.pp * layout.vp <= (job.num_layers or 99)
    assert layout.zero == case.target_layout.zero
    assert fits(layout, case)


def fits(layout: Layout, case: Case) -> bool:
    memory_bytes = case.capacity.memory_bytes
    needed = worker_bytes(case.job, layout) * case.job.margin
    return memory_bytes is None or needed <= memory_bytes


@profile(120)
@given(cases())
def test_target_layout_is_chosen_wherever_it_fits(case: Case) -> None:
    choice, target_layout = case.plan(), case.target_layout
    if target_layout.data_axes is None:
        return
    requested = target_layout.layout(*target_layout.data_axes)
    num_available = min(case.capacity.num_workers, target_layout.max_workers or 40)
    possible = requested.num_workers <= num_available and fits(requested, case)
    assert possible == (isinstance(choice, LayoutChoice) and target_layout.is_met(choice.layout))


@profile(120)
@given(cases())
def test_model_axes_are_the_requested_ones_if_any_layout_with_them_fits(case: Case) -> None:
    choice, target_layout, job = case.plan(), case.target_layout, case.job
    num_available = min(case.capacity.num_workers, target_layout.max_workers or 40)
    max_data_ranks = num_available // target_layout.num_model_ranks
    possible = [
        fsdp
        for fsdp in range(1, min(max_data_ranks, job.num_microbatches) + 1)
        if fsdp * target_layout.cp * target_layout.tp % target_layout.ep == 0
        and fits(target_layout.layout(1, fsdp), case)
    ]
    if possible:
        assert isinstance(choice, LayoutChoice)
        assert model_axes(choice.layout) == model_axes(target_layout)
    elif isinstance(choice, LayoutChoice):
        assert model_axes(choice.layout) != model_axes(target_layout)


def model_axes(layout: Layout | TargetLayout) -> tuple[int, ...]:
    return layout.pp, layout.cp, layout.tp, layout.ep, layout.vp


@profile(120)
@given(cases())
def test_no_model_axis_rises_unless_memory_requires_it(case: Case) -> None:
    choice, target_layout = case.plan(), case.target_layout
    if isinstance(choice, Infeasible) or (
        choice.layout.pp <= target_layout.pp and choice.layout.tp <= target_layout.tp
    ):
        return
    assert case.job.limits.num_layers is not None
    unbounded = case._replace(capacity=replace(case.capacity, memory_bytes=None)).plan()
    assert isinstance(unbounded, LayoutChoice)
    assert unbounded.layout.pp <= target_layout.pp and unbounded.layout.tp <= target_layout.tp


@profile(120)
@given(cases(), st.data())
def test_layout_is_the_same_after_shrinking_and_growing_again(
    case: Case, data: st.DataObject
) -> None:
    first = case.plan()
    if isinstance(first, Infeasible):
        return
    second = case.plan(first.layout)
    assert isinstance(second, LayoutChoice) and second.layout == first.layout
    num_workers = data.draw(st.integers(1, case.capacity.num_workers))
    smaller = case.plan(first.layout, num_workers=num_workers)
    if isinstance(smaller, LayoutChoice):
        assert smaller.layout.num_workers <= num_workers
        regrown = case.plan(smaller.layout)
        assert isinstance(regrown, LayoutChoice)
        has_requested_axes = model_axes(first.layout) == model_axes(case.target_layout)
        assert model_axes(regrown.layout) == model_axes(first.layout) or not has_requested_axes
        if case.target_layout.data_axes and case.target_layout.is_met(first.layout):
            assert regrown.layout == first.layout


@profile(100)
@given(cases(), st.integers(0, 999))
def test_proposal_does_not_depend_on_the_order_of_arrival(case: Case, seed: int) -> None:
    random = Random(seed)
    names = [f"w{i}" for i in range(case.capacity.num_workers)]
    topology = {name: Place(f"n{i // 4}", f"r{i // 12}") for i, name in enumerate(names)}
    shuffled = random.sample(names, len(names))
    proposals = [
        propose(
            None,
            members,
            generation=1,
            target_layout=case.target_layout,
            topology={name: topology[name] for name in members},
            job=case.job,
            memory_bytes=case.capacity.memory_bytes,
        )
        for members in (names, shuffled)
    ]
    assert proposals[0] == proposals[1]
    if isinstance(proposals[0], Proposal):
        assert proposals[0].reason
