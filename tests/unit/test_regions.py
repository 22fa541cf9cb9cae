"""Regions: chunks, intersections, and the chunks that overlap a region."""

from __future__ import annotations

import pytest

from elastic.geometry.regions import Region, chunk_interval


@pytest.mark.parametrize(
    ("size", "num_chunks", "intervals"),
    [
        (8, 4, [(0, 2), (2, 2), (4, 2), (6, 2)]),
        (7, 3, [(0, 3), (3, 3), (6, 1)]),
        (5, 4, [(0, 2), (2, 2), (4, 1), (5, 0)]),
        (2, 4, [(0, 1), (1, 1), (2, 0), (2, 0)]),
        (0, 2, [(0, 0), (0, 0)]),
    ],
)
def test_chunks_are_those_of_torch(
    size: int, num_chunks: int, intervals: list[tuple[int, int]]
) -> None:
    assert [chunk_interval(size, num_chunks, i) for i in range(num_chunks)] == intervals


def test_chunk_of_a_chunk_is_a_contiguous_box() -> None:
    half = Region.whole((8, 6)).chunk(0, 2, 1)
    assert half == Region((4, 0), (4, 6))
    assert half.chunk(0, 3, 2) == Region((8, 0), (0, 6))
    assert half.chunk(1, 2, 1).chunk(0, 3, 1) == Region((6, 3), (2, 3))


def test_intersection_without_elements_is_none() -> None:
    region = Region((2, 0), (4, 4))
    assert region.intersection(Region((0, 3), (3, 9))) == Region((2, 3), (1, 1))
    assert region.intersection(Region((6, 0), (1, 4))) is None
    assert region.intersection(Region((3, 1), (0, 2))) is None
    assert Region.whole(()).intersection(Region.whole(())) == Region((), ())


def test_scalar_region_has_one_element() -> None:
    assert Region.whole(()).num_elements == 1


def test_overlapping_chunks_are_computed_without_visiting_the_others() -> None:
    huge = Region.whole((10**15,))
    assert huge.overlapping_chunks(0, 10**12, Region((2500,), (1000,))) == range(2, 4)
    assert huge.overlapping_chunks(0, 10**12, Region((2500,), (0,))) == range(0)
    inner = Region((4,), (4,))
    assert inner.overlapping_chunks(0, 2, Region((0,), (4,))) == range(0)
    assert inner.overlapping_chunks(0, 3, Region((0,), (9,))) == range(2)
