"""The shard map on small cases that can be checked by hand."""

from __future__ import annotations

import pytest

from elastic.geometry.errors import InvalidLayout, InvalidSpec
from elastic.geometry.layout import Coordinates, Layout
from elastic.geometry.regions import Region
from elastic.geometry.shard_map import bytes_held, copies_of, region_of
from elastic.geometry.tensor_specs import TensorSpec

WEIGHT = TensorSpec("weight", (8, 6), fsdp_dim=0, tp_dim=0)


def rows_by_rank(spec: TensorSpec, layout: Layout) -> list[tuple[int, int] | None]:
    """(first row, number of rows) of each world rank."""
    places = map(layout.coordinates, range(layout.num_workers))
    regions = [region_of(spec, layout, place) for place in places]
    return [(r.offsets[0], r.shape[0]) if r else None for r in regions]


def test_fsdp_splits_the_tp_chunk_further() -> None:
    assert rows_by_rank(WEIGHT, Layout(fsdp=2, tp=2)) == [(0, 2), (4, 2), (2, 2), (6, 2)]


def test_dp_and_cp_replicate() -> None:
    assert rows_by_rank(WEIGHT, Layout(dp=2, cp=2)) == [(0, 8)] * 4
    assert copies_of(WEIGHT, Layout(dp=2, fsdp=4, cp=2)) == 4


def test_two_axes_may_split_two_dims() -> None:
    spec = TensorSpec("weight", (8, 6), fsdp_dim=0, tp_dim=1)
    place = Coordinates(fsdp=1, tp=2)
    assert region_of(spec, Layout(fsdp=2, tp=3), place) == Region((4, 4), (4, 2))


@pytest.mark.parametrize(
    ("kind", "sharded_from_stage"), [("parameter", 1), ("optimizer", 1), ("buffer", 4)]
)
def test_zero_stage_determines_the_kinds_of_tensors_that_fsdp_shards(
    kind: str, sharded_from_stage: int
) -> None:
    spec = TensorSpec("t", (8,), fsdp_dim=0, kind=kind)  # type: ignore[arg-type]
    for zero in range(4):
        expected = [(0, 4), (4, 4)] if zero >= sharded_from_stage else [(0, 8)] * 2
        assert rows_by_rank(spec, Layout(fsdp=2, zero=zero)) == expected


def test_layers_are_dealt_to_stages_in_order_and_evenly() -> None:
    layout = Layout(pp=3)
    layers = [TensorSpec(f"l{i}", (2,), layer=i, layer_costs=(1,) * 7) for i in range(7)]
    stages = [rows_by_rank(spec, layout).index((0, 2)) for spec in layers]
    assert stages == [0, 0, 1, 1, 1, 2, 2]
    assert all(rows_by_rank(spec, layout).count(None) == 2 for spec in layers)
    assert rows_by_rank(TensorSpec("shared", (2,)), layout) == [(0, 2)] * 3


def test_virtual_stages_alternate_over_the_pipeline_ranks() -> None:
    layers = [TensorSpec(f"l{i}", (2,), layer=i, layer_costs=(1,) * 6) for i in range(6)]
    stages = [rows_by_rank(spec, Layout(pp=2, vp=2)).index((0, 2)) for spec in layers]
    assert stages == [0, 0, 1, 0, 0, 1]


def test_fewer_layers_than_stages_are_refused() -> None:
    layer = TensorSpec("l0", (2,), layer=0, layer_costs=(1,))
    with pytest.raises(InvalidLayout, match="1 layers cannot fill 3"):
        rows_by_rank(layer, Layout(pp=3))


def test_layer_without_the_costs_of_all_layers_has_no_stage() -> None:
    spec = TensorSpec("l3", (2,), layer=3)
    assert rows_by_rank(spec, Layout(dp=2)) == [(0, 2)] * 2
    with pytest.raises(InvalidSpec, match="l3"):
        rows_by_rank(spec, Layout(pp=2))


def test_experts_fold_the_innermost_ranks_into_ep() -> None:
    experts = TensorSpec("experts", (8, 4), ep_dim=0, fsdp_dim=1, tp_dim=1)
    layout = Layout(fsdp=2, tp=2, ep=2)
    regions = [region_of(experts, layout, layout.coordinates(rank)) for rank in range(4)]
    assert regions == [
        Region((0, 0), (4, 2)),
        Region((4, 0), (4, 2)),
        Region((0, 2), (4, 2)),
        Region((4, 2), (4, 2)),
    ]


def test_experts_over_all_of_fsdp_and_cp_are_sharded_once() -> None:
    experts = TensorSpec("experts", (8, 4), ep_dim=0, fsdp_dim=0)
    assert (
        rows_by_rank(experts, Layout(dp=2, fsdp=2, cp=2, ep=4))
        == [(0, 2), (2, 2), (4, 2), (6, 2)] * 2
    )


def test_scalars_are_held_by_all_ranks() -> None:
    step = TensorSpec("step", (), "int64", kind="optimizer")
    assert region_of(step, Layout(fsdp=3), Coordinates(fsdp=2)) == Region((), ())
    assert bytes_held([step, WEIGHT], Layout(fsdp=3), Coordinates(fsdp=2)) == 8 + 2 * 6 * 4
