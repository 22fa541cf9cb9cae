"""Hypothesis strategies for layouts and tensor specs, and the settings of the tests."""

from __future__ import annotations

from dataclasses import replace
from math import prod

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from elastic.geometry.layout import Layout
from elastic.geometry.tensor_specs import TensorSpec, deal_out

MAX_RANKS = 16
SIZES = (7, 5, 11, 6, 7, 9, 1, 11, 8, 2, 5, 3, 0, 10, 4)
"""Sizes of dims; no degree but 1 divides most of them."""


def profile(num_examples: int) -> settings:
    """Settings for `num_examples` examples, the same at every run."""
    return settings(
        max_examples=num_examples,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    )


@st.composite
def layouts(draw: st.DrawFn, max_ranks: int = MAX_RANKS) -> Layout:
    """Any layout of at most `max_ranks` ranks; every axis is equally likely to be large."""
    degrees = dict.fromkeys(("pp", "dp", "fsdp", "cp", "tp"), 1)
    for axis in draw(st.permutations(list(degrees))):
        max_degree = max_ranks // prod(degrees.values())
        degrees[axis] = draw(st.sampled_from([n for n in (2, 1, 3, 2, 1, 5, 4) if n <= max_degree]))
    num_inner = degrees["fsdp"] * degrees["cp"] * degrees["tp"]
    ep = draw(st.sampled_from([n for n in range(1, num_inner + 1) if num_inner % n == 0]))
    zero = draw(st.sampled_from([3, 3, 3, 0, 1, 2]))
    vp = draw(st.sampled_from([1, 1, 2])) if 1 < degrees["pp"] <= 2 else 1
    return Layout(**degrees, ep=ep, zero=zero, vp=vp)


@st.composite
def specs(draw: st.DrawFn, name: str = "t") -> TensorSpec:
    """A small tensor of any kind, including uneven sizes and scalars."""
    shape = tuple(draw(st.lists(st.sampled_from(SIZES), max_size=3)))
    dims = st.sampled_from([*range(len(shape)), *range(len(shape)), None])
    layer_costs = draw(st.sampled_from([(1,) * 5, (0, 3, 3, 3, 3, 3, 8)]))
    ties_ends = draw(st.sampled_from([False, False, False, True]))
    layer = 0 if ties_ends else draw(st.none() | st.integers(0, len(layer_costs) - 1))
    return TensorSpec(
        name=name,
        shape=shape,
        dtype=draw(st.sampled_from(["float32", "bfloat16", "int64"])),
        layer=layer,
        fsdp_dim=draw(dims),
        tp_dim=draw(dims),
        ep_dim=draw(st.sampled_from([None, None, draw(dims)])),
        kind=draw(st.sampled_from(["parameter", "optimizer", "buffer"])),
        layer_costs=layer_costs,
        ties_ends=ties_ends,
        ownership=draw(st.sampled_from([None, None, *deal_out([4, 1, 7, 2, 2])])),
    )


def spec_lists() -> st.SearchStrategy[list[TensorSpec]]:
    """A few specs; some have the same sharding, or would have it except for their layer."""
    return st.lists(specs(), min_size=1, max_size=4).map(
        lambda drawn: [
            *drawn,
            drawn[0],
            *(replace(drawn[0], layer=i, ties_ends=False) for i in (0, 4)[: len(drawn)]),
        ]
    )
