"""Layouts for random wishes, models, memories and numbers of workers."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import NamedTuple

from geometry_strategies import profile
from hypothesis import given
from hypothesis import strategies as st

from elastic.assigning import Place, Proposal, propose
from elastic.infeasible import Infeasible
from elastic.layout import Layout
from elastic.limits import Limits
from elastic.memory import worker_bytes
from elastic.planning import Capacity, Choice, Job, LinkSpeeds, Wish, plan_layout


class Case(NamedTuple):
    """A wish that the model's shape allows, and some workers."""

    wish: Wish
    job: Job
    capacity: Capacity
    snapshots_cover: bool

    def plan(self, previous: Layout | None = None, **changed: int) -> Choice | Infeasible:
        capacity = replace(self.capacity, **changed)
        return plan_layout(previous, capacity, self.wish, self.job, self.snapshots_cover)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    degrees = st.sampled_from([1, 1, 2, 3, 4])
    pp, cp, tp = draw(degrees), draw(st.sampled_from([1, 1, 2])), draw(degrees)
    vp = draw(st.sampled_from([1, 2])) if pp > 1 else 1
    wish = Wish(pp, cp, tp, draw(st.sampled_from([1, 1, 2, 4])), draw(st.integers(0, 3)), vp)
    if draw(st.booleans()):
        fsdp = wish.least_fsdp * draw(st.integers(1, 2))
        wish = replace(wish, dp=draw(st.integers(1, 3)), fsdp=fsdp)
    if draw(st.booleans()):
        at_least = wish.num_model_ranks * wish.least_fsdp * (wish.dp or 1)
        wish = replace(wish, max_workers=at_least * draw(st.integers(1, 3)))
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
        links=LinkSpeeds(draw(speeds), draw(speeds), draw(speeds)),
    )
    memory_bytes = draw(st.none() | st.integers(30, 2000))
    capacity = Capacity(draw(st.integers(0, 40)), memory_bytes, draw(st.integers(1, 8)), 16)
    return Case(wish, job, capacity, draw(st.booleans()))


@profile(120)
@given(cases())
def test_a_plan_is_possible_in_every_way(case: Case) -> None:
    choice = case.plan()
    if isinstance(choice, Infeasible):
        assert choice.reason
        return
    layout, job = choice.layout, case.job
    assert choice.reason and all(choice.refusals)
    assert job.limits.refusal(layout) is None
    assert layout.num_workers <= min(case.capacity.num_workers, case.wish.max_workers or 40)
    assert layout.num_data_ranks <= job.num_microbatches
    assert layout.pp * layout.vp <= (job.num_layers or 99)
    assert layout.zero == case.wish.zero
    assert fits(layout, case)


def fits(layout: Layout, case: Case) -> bool:
    memory_bytes = case.capacity.memory_bytes
    needed = worker_bytes(case.job, layout) * case.job.margin
    return memory_bytes is None or needed <= memory_bytes


@profile(120)
@given(cases())
def test_the_wish_is_taken_wherever_it_fits(case: Case) -> None:
    choice, wish = case.plan(), case.wish
    if wish.data_axes is None:
        return
    wished = wish.layout(*wish.data_axes)
    room = min(case.capacity.num_workers, wish.max_workers or 40)
    possible = wished.num_workers <= room and fits(wished, case)
    assert possible == (isinstance(choice, Choice) and wish.is_met(choice.layout))


@profile(120)
@given(cases())
def test_the_model_axes_are_the_wished_ones_wherever_any_layout_with_them_fits(case: Case) -> None:
    choice, wish, job = case.plan(), case.wish, case.job
    room = min(case.capacity.num_workers, wish.max_workers or 40) // wish.num_model_ranks
    possible = [
        fsdp
        for fsdp in range(1, min(room, job.num_microbatches) + 1)
        if fsdp * wish.cp * wish.tp % wish.ep == 0 and fits(wish.layout(1, fsdp), case)
    ]
    if possible:
        assert isinstance(choice, Choice)
        assert model_axes(choice.layout) == (wish.pp, wish.cp, wish.tp, wish.ep, wish.vp)
    elif isinstance(choice, Choice):
        assert model_axes(choice.layout) != (wish.pp, wish.cp, wish.tp, wish.ep, wish.vp)


def model_axes(layout: Layout) -> tuple[int, ...]:
    return layout.pp, layout.cp, layout.tp, layout.ep, layout.vp


@profile(120)
@given(cases())
def test_no_axis_rises_unless_memory_asks_for_it(case: Case) -> None:
    choice, wish = case.plan(), case.wish
    if isinstance(choice, Infeasible) or (
        choice.layout.pp <= wish.pp and choice.layout.tp <= wish.tp
    ):
        return
    assert case.job.limits.num_layers is not None
    roomy = case._replace(capacity=replace(case.capacity, memory_bytes=None)).plan()
    assert isinstance(roomy, Choice)
    assert roomy.layout.pp <= wish.pp and roomy.layout.tp <= wish.tp


@profile(120)
@given(cases(), st.data())
def test_shrunk_and_grown_again_it_is_what_it_was(case: Case, data: st.DataObject) -> None:
    first = case.plan()
    if isinstance(first, Infeasible):
        return
    again = case.plan(first.layout)
    assert isinstance(again, Choice) and again.layout == first.layout
    fewer = data.draw(st.integers(1, case.capacity.num_workers))
    small = case.plan(first.layout, num_workers=fewer)
    if isinstance(small, Choice):
        assert small.layout.num_workers <= fewer
        back = case.plan(small.layout)
        assert isinstance(back, Choice)
        assert model_axes(back.layout) == model_axes(first.layout) or not is_wished(first, case)
        if case.wish.data_axes and case.wish.is_met(first.layout):
            assert back.layout == first.layout


def is_wished(choice: Choice, case: Case) -> bool:
    wish = case.wish
    return model_axes(choice.layout) == (wish.pp, wish.cp, wish.tp, wish.ep, wish.vp)


@profile(100)
@given(cases(), st.integers(0, 999))
def test_a_proposal_does_not_depend_on_the_order_of_arrival(case: Case, seed: int) -> None:
    random = Random(seed)
    names = [f"w{i}" for i in range(case.capacity.num_workers)]
    topology = {name: Place(f"n{i // 4}", f"r{i // 12}") for i, name in enumerate(names)}
    shuffled = random.sample(names, len(names))
    proposals = [
        propose(
            None,
            members,
            generation=1,
            wish=case.wish,
            topology={name: topology[name] for name in members},
            job=case.job,
            memory_bytes=case.capacity.memory_bytes,
        )
        for members in (names, shuffled)
    ]
    assert proposals[0] == proposals[1]
    if isinstance(proposals[0], Proposal):
        assert proposals[0].reason
