"""The shard map in cases that can be checked by eye."""

from __future__ import annotations

import pytest

from elastic.geometry.errors import InvalidLayout, InvalidSpec
from elastic.geometry.layout import Coordinates, Layout
from elastic.geometry.regions import Region
from elastic.geometry.shard_map import bytes_held, copies_of, region_of
from elastic.geometry.tensor_specs import TensorSpec

WEIGHT = TensorSpec("weight", (8, 6), fsdp_dim=0, tp_dim=0)


def rows(spec: TensorSpec, layout: Layout) -> list[tuple[int, int] | None]:
    """(first row, number of rows) of each world rank."""
    places = map(layout.coordinates, range(layout.num_workers))
    regions = [region_of(spec, layout, place) for place in places]
    return [(r.offsets[0], r.shape[0]) if r else None for r in regions]


def test_fsdp_cuts_the_tp_chunk_again() -> None:
    assert rows(WEIGHT, Layout(fsdp=2, tp=2)) == [(0, 2), (4, 2), (2, 2), (6, 2)]


def test_dp_and_cp_replicate() -> None:
    assert rows(WEIGHT, Layout(dp=2, cp=2)) == [(0, 8)] * 4
    assert copies_of(WEIGHT, Layout(dp=2, fsdp=4, cp=2)) == 4


def test_two_axes_may_cut_two_dims() -> None:
    spec = TensorSpec("weight", (8, 6), fsdp_dim=0, tp_dim=1)
    place = Coordinates(fsdp=1, tp=2)
    assert region_of(spec, Layout(fsdp=2, tp=3), place) == Region((4, 4), (4, 2))


@pytest.mark.parametrize(("kind", "cut_from"), [("parameter", 1), ("optimizer", 1), ("buffer", 4)])
def test_the_zero_stage_says_what_fsdp_cuts(kind: str, cut_from: int) -> None:
    spec = TensorSpec("t", (8,), fsdp_dim=0, kind=kind)  # type: ignore[arg-type]
    for zero in range(4):
        expected = [(0, 4), (4, 4)] if zero >= cut_from else [(0, 8)] * 2
        assert rows(spec, Layout(fsdp=2, zero=zero)) == expected


def test_layers_are_dealt_to_stages_in_order_and_evenly() -> None:
    layout = Layout(pp=3)
    layers = [TensorSpec(f"l{i}", (2,), layer=i, layer_costs=(1,) * 7) for i in range(7)]
    stages = [rows(spec, layout).index((0, 2)) for spec in layers]
    assert stages == [0, 0, 1, 1, 1, 2, 2]
    assert all(rows(spec, layout).count(None) == 2 for spec in layers)
    assert rows(TensorSpec("shared", (2,)), layout) == [(0, 2)] * 3


def test_virtual_stages_go_round_the_pipeline_ranks() -> None:
    layers = [TensorSpec(f"l{i}", (2,), layer=i, layer_costs=(1,) * 6) for i in range(6)]
    stages = [rows(spec, Layout(pp=2, vp=2)).index((0, 2)) for spec in layers]
    assert stages == [0, 0, 1, 0, 0, 1]


def test_fewer_layers_than_stages_are_refused() -> None:
    only = TensorSpec("l0", (2,), layer=0, layer_costs=(1,))
    with pytest.raises(InvalidLayout, match="1 layers cannot fill 3"):
        rows(only, Layout(pp=3))


def test_a_layer_without_the_costs_of_all_has_no_stage() -> None:
    spec = TensorSpec("l3", (2,), layer=3)
    assert rows(spec, Layout(dp=2)) == [(0, 2)] * 2
    with pytest.raises(InvalidSpec, match="l3"):
        rows(spec, Layout(pp=2))


def test_experts_fold_the_innermost_ranks_into_ep() -> None:
    experts = TensorSpec("experts", (8, 4), ep_dim=0, fsdp_dim=1, tp_dim=1)
    layout = Layout(fsdp=2, tp=2, ep=2)
    held = [region_of(experts, layout, layout.coordinates(rank)) for rank in range(4)]
    assert held == [
        Region((0, 0), (4, 2)),
        Region((4, 0), (4, 2)),
        Region((0, 2), (4, 2)),
        Region((4, 2), (4, 2)),
    ]


def test_experts_over_all_of_fsdp_and_cp_are_cut_once() -> None:
    experts = TensorSpec("experts", (8, 4), ep_dim=0, fsdp_dim=0)
    assert rows(experts, Layout(dp=2, fsdp=2, cp=2, ep=4)) == [(0, 2), (2, 2), (4, 2), (6, 2)] * 2


def test_scalars_are_held_by_all() -> None:
    step = TensorSpec("step", (), "int64", kind="optimizer")
    assert region_of(step, Layout(fsdp=3), Coordinates(fsdp=2)) == Region((), ())
    assert bytes_held([step, WEIGHT], Layout(fsdp=3), Coordinates(fsdp=2)) == 8 + 2 * 6 * 4
