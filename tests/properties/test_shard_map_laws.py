"""The shard map against an element-wise reference, over all axes and uneven sizes."""

from __future__ import annotations

import numpy as np
from geometry_strategies import layouts, profile, specs
from hypothesis import given
from hypothesis import strategies as st
from reference_geometry import held_by_rank

from elastic.geometry.layout import Layout
from elastic.geometry.regions import Region
from elastic.geometry.shard_map import bytes_held, copies_of, region_of, sharding_of
from elastic.geometry.tensor_specs import TensorSpec


@profile(150)
@given(specs(), layouts())
def test_each_rank_holds_the_elements_of_the_reference(spec: TensorSpec, layout: Layout) -> None:
    for rank, expected in enumerate(held_by_rank(spec, layout)):
        mask = np.zeros(spec.shape, dtype=np.bool_)
        region = region_of(spec, layout, layout.coordinates(rank))
        if region is not None:
            mask[_box(region)] = True
            assert region.num_elements == mask.sum()
        assert np.array_equal(mask, expected)


@profile(150)
@given(specs(), layouts())
def test_every_element_has_the_same_number_of_copies(spec: TensorSpec, layout: Layout) -> None:
    masks = held_by_rank(spec, layout)
    assert (sum(mask.astype(np.int64) for mask in masks) == copies_of(spec, layout)).all()


@profile(100)
@given(st.lists(specs(), max_size=3), layouts())
def test_bytes_held_by_all_are_the_bytes_times_their_copies(
    tensors: list[TensorSpec], layout: Layout
) -> None:
    coordinates = map(layout.coordinates, range(layout.num_workers))
    total = sum(spec.num_bytes * copies_of(spec, layout) for spec in tensors)
    assert sum(bytes_held(tensors, layout, place) for place in coordinates) == total


@profile(150)
@given(specs(), layouts())
def test_holders_are_named_and_counted_consistently(spec: TensorSpec, layout: Layout) -> None:
    sharding = sharding_of(spec, layout)
    ranks = [rank for rank in range(layout.num_workers) if sharding.is_held_by(rank)]
    first_holders = [sharding.first_holder(rank) for rank in ranks]
    assert sorted(set(first_holders)) == sharding.first_holders()
    for first in sharding.first_holders():
        holders = [rank for rank in ranks if sharding.first_holder(rank) == first]
        assert holders == sharding.holders(first)
        assert [sharding.copy_index(rank) for rank in holders] == list(range(len(holders)))
        assert [sharding.holder(first, i) for i in range(len(holders))] == holders
        assert all(sharding.region(rank) == sharding.region(first) for rank in holders)


@profile(150)
@given(specs(), layouts(), st.data())
def test_overlaps_equal_those_of_a_comparison_with_every_region(
    spec: TensorSpec, layout: Layout, data: st.DataObject
) -> None:
    offsets = tuple(data.draw(st.integers(0, size)) for size in spec.shape)
    shape = tuple(
        data.draw(st.integers(0, size - offset))
        for size, offset in zip(spec.shape, offsets, strict=True)
    )
    region_of_interest, sharding = Region(offsets, shape), sharding_of(spec, layout)
    all_regions = [(first, sharding.region(first)) for first in sharding.first_holders()]
    common = [(first, region.intersection(region_of_interest)) for first, region in all_regions]
    expected = [(first, region) for first, region in common if region is not None]
    assert sorted(sharding.overlaps(region_of_interest)) == expected


def _box(region: Region) -> tuple[slice, ...]:
    bounds = zip(region.offsets, region.shape, strict=True)
    return tuple(slice(begin, begin + length) for begin, length in bounds)
