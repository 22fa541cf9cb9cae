"""The deal of layers to pipeline stages against every other possible deal."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from geometry_strategies import profile
from hypothesis import given
from hypothesis import strategies as st

from elastic.geometry.pipeline_stages import deal_layers, pipeline_ranks

COSTS = st.lists(st.integers(0, 20), min_size=1, max_size=9).map(tuple)


@profile(300)
@given(COSTS, st.data())
def test_no_other_deal_has_a_cheaper_costliest_stage(
    costs: tuple[int, ...], data: st.DataObject
) -> None:
    num_stages = data.draw(st.integers(1, len(costs)))
    stages = deal_layers(costs, num_stages)
    assert [layer for stage in stages for layer in stage] == list(range(len(costs)))
    assert all(stages) and len(stages) == num_stages
    all_costs = (
        max(sum(costs[a:b]) for a, b in pairwise((0, *cuts, len(costs))))
        for cuts in combinations(range(1, len(costs)), num_stages - 1)
    )
    assert max(sum(costs[layer] for layer in stage) for stage in stages) == min(all_costs)


@pytest.mark.parametrize(
    ("costs", "num_layers"),
    [((1,) * 10, [3, 2, 3, 2]), ((0, *[4] * 8, 4), [3, 2, 3, 2]), ((1,) * 7, [2, 2, 2, 1])],
)
def test_equal_layers_are_dealt_evenly(costs: tuple[int, ...], num_layers: list[int]) -> None:
    assert [len(stage) for stage in deal_layers(costs, 4)] == num_layers


def test_stage_with_a_costly_head_has_fewer_layers() -> None:
    assert deal_layers((0, 3, 3, 3, 3, 6), 2) == (range(4), range(4, 6))
    assert pipeline_ranks((1,) * 6, pp=2, vp=3) == (0, 1, 0, 1, 0, 1)
