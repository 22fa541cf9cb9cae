"""Shard map: which region of which tensor a rank holds under a layout.

A tensor sees the world ranks as a row-major mesh. Each mesh axis does one of three things to
the tensor: it cuts a dim, it selects (a layer lies on one pipeline stage), or it replicates.

- Dense tensors see `pp, dp, fsdp, cp, tp`: `tp` cuts `tp_dim`, then `fsdp` cuts the resulting
  chunk along `fsdp_dim`; `dp` and `cp` replicate. If both cut the same dim, the tp chunk is cut
  again into contiguous boxes, as torch's `_StridedShard` does.
- Expert tensors see `pp, dp, rest, ep` with `rest x ep = fsdp x cp x tp`: the innermost `ep`
  of these ranks form an expert group and cut `ep_dim`; `rest` does what `fsdp` does for dense
  tensors; `tp_dim` is not used (as in torchtitan with an expert tensor parallelism of 1).
- A tensor with an `ownership` is not cut by `fsdp` but dealt: one rank has all of it, the others
  an empty part.
- `zero` says whether `fsdp` (or `rest`) cuts at all: from 1 on it cuts optimizer state and
  parameters, never buffers. A worker that computes with whole parameters (zero=1 and 2) keeps
  only its own part of them current, so it holds only that part.
- Layers are dealt to stages in order and by cost (see `pipeline_stages`); `layer=None`
  replicates over `pp`.

Axes cut from the innermost outwards, so one number names a region: the first world rank that
holds it. Everything else is arithmetic on strides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from elastic.geometry.errors import InvalidSpec
from elastic.geometry.layout import Coordinates, Layout
from elastic.geometry.pipeline_stages import pipeline_ranks
from elastic.geometry.regions import Region
from elastic.geometry.tensor_specs import TensorSpec
from elastic.geometry.zero import divides


class Axis(NamedTuple):
    """A mesh axis as one tensor sees it: `world_rank // stride % degree` is the index on it."""

    degree: int
    stride: int


class AxisCut(NamedTuple):
    """An axis that cuts a dim into `axis.degree` chunks, equal ones or one whole chunk for the
    `owner`."""

    dim: int
    axis: Axis
    owner: int | None = None

    def part(self, region: Region, index: int) -> Region:
        """The chunk of a region at an index of the axis, possibly empty."""
        if self.owner is None:
            return region.chunk(self.dim, self.axis.degree, index)
        return region.chunk(self.dim, 1, 0 if index == self.owner else 1)

    def overlapping(self, region: Region, wanted: Region) -> Sequence[int]:
        """The indices of the axis whose chunks of a region overlap `wanted` in the dim."""
        if self.owner is None:
            return region.overlapping_chunks(self.dim, self.axis.degree, wanted)
        return [self.owner for _ in region.overlapping_chunks(self.dim, 1, wanted)]


@dataclass(frozen=True, slots=True)
class Sharding:
    """How one tensor lies on the world ranks of one layout.

    `cuts` are in the order in which they are made. `copies` are the axes that replicate, from
    the outermost inwards. `stages` are the world ranks of the tensor's pipeline stage, or of both
    stages if it ties the first to the last one.
    """

    shape: tuple[int, ...]
    cuts: tuple[AxisCut, ...]
    copies: tuple[Axis, ...]
    stages: tuple[range, ...]

    @property
    def num_copies(self) -> int:
        """The number of ranks that hold each element."""
        return prod(axis.degree for axis in self.copies)

    def is_held_by(self, world_rank: int) -> bool:
        """Whether a rank is on a stage of the tensor, so that it holds a region of it."""
        return any(world_rank in stage for stage in self.stages)

    def region(self, world_rank: int) -> Region:
        """The region that a rank of the stages holds, possibly empty."""
        region = Region.whole(self.shape)
        for cut in self.cuts:
            degree, stride = cut.axis
            region = cut.part(region, world_rank // stride % degree)
        return region

    def first_holder(self, world_rank: int) -> int:
        """The lowest rank that holds the same region as this rank; it names the region."""
        for degree, stride in self.copies:
            world_rank -= world_rank // stride % degree * stride
        return world_rank

    def copy_index(self, world_rank: int) -> int:
        """The index of a rank among the holders of its region."""
        index = 0
        for degree, stride in self.copies:
            index = index * degree + world_rank // stride % degree
        return index

    def holder(self, first_holder: int, copy_index: int) -> int:
        """The rank with this index among a region's holders: the inverse of `copy_index`."""
        rank = first_holder
        for degree, stride in reversed(self.copies):
            copy_index, index = divmod(copy_index, degree)
            rank += index * stride
        return rank

    def holders(self, first_holder: int) -> list[int]:
        """All ranks that hold a region, ascending."""
        ranks = [first_holder]
        for degree, stride in self.copies:
            ranks = [rank + i * stride for rank in ranks for i in range(degree)]
        return ranks

    def first_holders(self) -> list[int]:
        """The first holders of all regions, empty regions included, ascending."""
        ranks = [self.stages[0].start]
        for cut in reversed(self.cuts):
            degree, stride = cut.axis
            ranks = [rank + i * stride for rank in ranks for i in range(degree)]
        return ranks

    def overlaps(self, wanted: Region) -> list[tuple[int, Region]]:
        """The regions that overlap `wanted`: the first holder and the overlap of each."""
        chunks = [(self.stages[0].start, Region.whole(self.shape))]
        for cut in self.cuts:
            chunks = [
                (first + i * cut.axis.stride, cut.part(region, i))
                for first, region in chunks
                for i in cut.overlapping(region, wanted)
            ]
        common = [(first, region.intersection(wanted)) for first, region in chunks]
        return [(first, region) for first, region in common if region is not None]


def sharding_of(spec: TensorSpec, layout: Layout) -> Sharding:
    """The sharding of a tensor under a layout. Raises `InvalidSpec` if its layer has no stage."""
    cuts: list[AxisCut] = []
    copies: list[Axis] = []
    stride = 1
    for degree, dim, owner in reversed(_mesh(spec, layout)):
        if dim is not None and degree > 1:
            cuts.append(AxisCut(dim, Axis(degree, stride), owner))
        elif copies and copies[0].stride * copies[0].degree == stride:
            copies[0] = Axis(copies[0].degree * degree, copies[0].stride)
        elif degree > 1:
            copies.insert(0, Axis(degree, stride))
        stride *= degree
    first = stage_of(spec, layout) * stride
    stages = [range(first, first + stride)]
    if spec.ties_ends and layout.pp > 1:
        last = (layout.pp - 1) * stride
        copies.insert(0, Axis(2, last))
        stages.append(range(last, last + stride))
    return Sharding(spec.shape, tuple(cuts), tuple(copies), tuple(stages))


def stage_of(spec: TensorSpec, layout: Layout) -> int:
    """The pipeline rank of a spec's layer; 0 if there is only one rank or no layer."""
    if layout.pp == 1 or spec.layer is None:
        return 0
    if not 0 <= spec.layer < len(spec.layer_costs):
        raise InvalidSpec(
            f"'{spec.name}': layer {spec.layer} of {len(spec.layer_costs)} has no stage under "
            f"{layout}: set `layer_costs`, the costs of all layers, in every spec with a layer"
        )
    return pipeline_ranks(spec.layer_costs, layout.pp, layout.vp)[spec.layer]


def alike(spec: TensorSpec, *layouts: Layout) -> tuple[object, ...]:
    """A key: tensors with equal keys have the same sharding under each of these layouts."""
    return (
        spec.shape,
        spec.fsdp_dim,
        spec.tp_dim,
        spec.ep_dim,
        spec.kind,
        spec.layer is None,
        spec.ties_ends,
        *[stage_of(spec, layout) for layout in layouts],
        *[_owner(spec, layout) for layout in layouts],
    )


def region_of(spec: TensorSpec, layout: Layout, coordinates: Coordinates) -> Region | None:
    """The region of a tensor that a rank holds, in the coordinates of the logical tensor.

    Empty if a dim has fewer chunks than ranks; None if the tensor lies on another pipeline
    stage. Raises `InvalidSpec`.
    """
    sharding = sharding_of(spec, layout)
    world_rank = layout.world_rank(coordinates)
    return sharding.region(world_rank) if sharding.is_held_by(world_rank) else None


def copies_of(spec: TensorSpec, layout: Layout) -> int:
    """The number of ranks that hold each element of a tensor."""
    return sharding_of(spec, layout).num_copies


def bytes_held(specs: Sequence[TensorSpec], layout: Layout, coordinates: Coordinates) -> int:
    """The bytes of state that the rank at these coordinates holds."""
    regions = ((spec, region_of(spec, layout, coordinates)) for spec in specs)
    return sum(region.num_elements * spec.itemsize_bytes for spec, region in regions if region)


def _mesh(spec: TensorSpec, layout: Layout) -> list[tuple[int, int | None, int | None]]:
    """The axes that a tensor sees, outermost first: the degree of each, the dim that it cuts, and
    the index of the owner if it deals the tensor whole."""
    fsdp_dim = spec.fsdp_dim if _fsdp_cuts(spec, layout) else None
    by_fsdp = (_num_shards(spec, layout), fsdp_dim, _owner(spec, layout))
    mesh: list[tuple[int, int | None, int | None]] = [(layout.dp, None, None), by_fsdp]
    if spec.layer is None:
        mesh.insert(0, (layout.pp, None, None))
    if spec.ep_dim is None:
        return [*mesh, (layout.cp, None, None), (layout.tp, spec.tp_dim, None)]
    return [*mesh, (layout.ep, spec.ep_dim, None)]


def _num_shards(spec: TensorSpec, layout: Layout) -> int:
    """The degree of the axis that does to a tensor what `fsdp` does to dense tensors."""
    if spec.ep_dim is None:
        return layout.fsdp
    return layout.fsdp * layout.cp * layout.tp // layout.ep


def _owner(spec: TensorSpec, layout: Layout) -> int | None:
    """The index, on the axis that does what `fsdp` does, of the owner of a tensor that has one."""
    if spec.ownership is None:
        return None
    return spec.ownership.rank(_num_shards(spec, layout), layout.pp * layout.vp)


def _fsdp_cuts(spec: TensorSpec, layout: Layout) -> bool:
    # Parameters too: a worker with whole parameters keeps only its own part of them current.
    return divides(layout.zero, "optimizer") and spec.kind in ("parameter", "optimizer")
