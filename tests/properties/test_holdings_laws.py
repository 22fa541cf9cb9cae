"""Coverage and the choice of holdings against an element-wise reference."""

from __future__ import annotations

from geometry_strategies import layouts, profile, spec_lists
from hypothesis import given
from hypothesis import strategies as st
from reference_geometry import is_covered

from elastic.geometry.layout import Layout
from elastic.geometry.tensor_specs import TensorSpec
from elastic.reshard.holdings import (
    Holding,
    SourceChoice,
    Tier,
    choose,
    substitute_specs,
    uncovered,
)


@profile(150)
@given(spec_lists(), layouts(), st.data())
def test_coverage_equals_that_of_the_elements(
    specs: list[TensorSpec], layout: Layout, data: st.DataObject
) -> None:
    ranks = range(layout.num_workers)
    dead_ranks = set(data.draw(st.lists(st.sampled_from(ranks), max_size=4)))
    live_ranks = [rank for rank in ranks if rank not in dead_ranks]
    missing = uncovered(specs, layout, live_ranks)
    assert (missing is None) == is_covered(specs, layout, live_ranks)
    if missing is not None:
        assert not is_covered([missing], layout, live_ranks)
    dense = [spec for spec in specs if spec.ep_dim is None or layout.ep > 1]
    if uncovered(substitute_specs(layout), layout, live_ranks) is None:
        assert is_covered(dense, layout, live_ranks)


@st.composite
def holdings(draw: st.DrawFn) -> list[Holding]:
    """Holdings of a few steps: live workers, snapshots and complete checkpoints."""
    drawn_holdings: list[Holding] = []
    for generation in range(1, draw(st.integers(1, 3)) + 1):
        layout, step = draw(layouts(6)), draw(st.integers(1, 3))
        ranks = st.sampled_from(range(layout.num_workers))
        for tier in (Tier.LIVE, Tier.SNAPSHOT):
            for rank in sorted(set(draw(st.lists(ranks, max_size=8)))):
                place = layout.coordinates(rank)
                name = f"{tier.name}{rank}"
                drawn_holdings.append(Holding(name, tier, 0, step, generation, layout, place))
    if draw(st.booleans()):
        drawn_holdings.append(Holding("storage", Tier.CHECKPOINT, 0, draw(st.integers(1, 3)), 1))
    return drawn_holdings


@profile(150)
@given(spec_lists(), holdings(), st.randoms(use_true_random=False))
def test_newest_covered_step_is_chosen_in_any_order_of_holdings(
    specs: list[TensorSpec], drawn: list[Holding], random: object
) -> None:
    choice = choose(specs, drawn)
    newest_covered_step = max(
        (step for step in (1, 2, 3) if _is_covered_at(specs, drawn, step)), default=None
    )
    if not isinstance(choice, SourceChoice):
        assert newest_covered_step is None
        return
    assert choice.step == newest_covered_step
    assert _covers(specs, choice.holdings)
    assert {holding.step for holding in choice.holdings} == {newest_covered_step}
    assert max(holding.tier for holding in choice.holdings) == choice.tier
    reverse = choose(specs, drawn[::-1])
    assert isinstance(reverse, SourceChoice)
    assert (reverse.step, reverse.tier) == (choice.step, choice.tier)
    assert sorted(reverse.holdings) == sorted(choice.holdings)


def _covers(specs: list[TensorSpec], group: tuple[Holding, ...]) -> bool:
    layout = group[0].layout
    return is_covered(specs, layout, [layout.world_rank(h.coordinates) for h in group])


def _is_covered_at(specs: list[TensorSpec], drawn: list[Holding], step: int) -> bool:
    at_step = [holding for holding in drawn if holding.step == step]
    if any(holding.tier is Tier.CHECKPOINT for holding in at_step):
        return True
    generations = {holding.generation for holding in at_step}
    parts = [tuple(h for h in at_step if h.generation == g) for g in generations]
    return any(_covers(specs, part) for part in parts)
