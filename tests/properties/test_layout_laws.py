"""Invariant 1: world ranks are a bijection, and each axis' groups partition them."""

from __future__ import annotations

from geometry_strategies import layouts, profile
from hypothesis import given

from elastic.geometry.layout import AXES, Layout


@profile(100)
@given(layouts())
def test_coordinates_and_world_ranks_are_inverse(layout: Layout) -> None:
    places = [layout.coordinates(rank) for rank in range(layout.num_workers)]
    assert sorted(places) == places
    assert [layout.world_rank(place) for place in places] == list(range(layout.num_workers))


@profile(100)
@given(layouts())
def test_groups_of_each_axis_partition_the_ranks(layout: Layout) -> None:
    for axis, degree in zip(AXES, layout.degrees, strict=True):
        groups = layout.groups(axis)
        assert sorted(rank for group in groups for rank in group) == list(range(layout.num_workers))
        for group in groups:
            places = [layout.coordinates(rank)._asdict() for rank in group]
            assert [place.pop(axis) for place in places] == list(range(degree))
            assert all(place == places[0] for place in places)


@profile(100)
@given(layouts())
def test_layout_is_parsed_from_its_text(layout: Layout) -> None:
    assert Layout.parse(str(layout)) == layout
