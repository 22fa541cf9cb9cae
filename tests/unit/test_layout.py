"""Layouts as text, and the order of their ranks."""

from __future__ import annotations

import pytest

from elastic.geometry.errors import InvalidLayout
from elastic.geometry.layout import Coordinates, Layout


def test_innermost_axis_changes_fastest() -> None:
    layout = Layout(pp=2, dp=2, tp=2)
    assert [layout.coordinates(rank)[:2] + layout.coordinates(rank)[4:] for rank in range(4)] == [
        (0, 0, 0),
        (0, 0, 1),
        (0, 1, 0),
        (0, 1, 1),
    ]
    assert layout.world_rank(Coordinates(pp=1, tp=1)) == 5
    assert layout.groups("dp") == ((0, 2), (1, 3), (4, 6), (5, 7))


def test_text_of_a_layout_omits_degrees_of_1() -> None:
    assert str(Layout(dp=2, tp=4)) == "dp=2,tp=4"
    assert str(Layout(fsdp=2, zero=1)) == "fsdp=2,zero=1"
    assert str(Layout()) == "dp=1"
    assert Layout.parse(" dp=2, fsdp=3 ") == Layout(dp=2, fsdp=3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dp=0", "at least 1"),
        ("dp", "whole number"),
        ("dp=2.5", "whole number"),
        ("dp=2,dp=3", "twice"),
        ("xp=2", "not an axis"),
        ("zero=4", "0, 1, 2 or 3"),
        ("fsdp=3,ep=2", "does not divide"),
        ("", "not an axis"),
    ],
)
def test_invalid_layout_is_refused(text: str, message: str) -> None:
    with pytest.raises(InvalidLayout, match=message):
        Layout.parse(text)


def test_world_rank_outside_the_mesh_is_refused() -> None:
    with pytest.raises(InvalidLayout, match="outside"):
        Layout(dp=2).coordinates(2)
