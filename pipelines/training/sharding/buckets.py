"""Parameters of which each rank computes with the full, gathered and reduced by the bucket."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

from actors.distributed.stall import wait_for
from elastic.geometry.regions import chunk_interval
from pipelines.training.sharding.sharded import as_distributed, count_copies, local_tensor
from pipelines.training.tensor.collectives import all_gather, reduce_scatter

Finish = Callable[[], None]
"""Waits for a collective that was begun, and puts what came of it into its embed_shard."""


class Chunks:
    """A local tensor of `shape` cut along dim 0 as `torch.chunk` cuts it, into chunks of which
    one is this rank's; `width` elements each, padding included."""

    def __init__(self, shape: Sequence[int], num_chunks: int, index: int) -> None:
        self.num_chunks = num_chunks
        self.index = index
        self.begin, self.length = chunk_interval(shape[0], num_chunks, index)
        self.width = -(-shape[0] // num_chunks) * prod(shape[1:])

    def own(self, full: Tensor) -> Tensor:
        """This rank's chunk, as a view."""
        return full[self.begin : self.begin + self.length]

    def padded(self, full: Tensor) -> Tensor:
        """All chunks in rows: (num_chunks, width)."""
        return _padded(full, self.num_chunks * self.width).view(self.num_chunks, self.width)

    def unpadded(self, rows: Tensor, full: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Of rows (num_chunks, width) what belongs into a whole tensor: (target, source)."""
        targets = full.view(-1).split(max(self.width, 1))
        return [(target, row[: target.numel()]) for target, row in zip(targets, rows, strict=False)]


class BucketParameter:
    """One parameter: the `whole` of it that this rank computes with, and its `shard`.

    The shard is a view of the full, unless it has another dtype or lies on another device.
    `summed` is the gradient of the full, summed over microbatches, `gradient` that of the shard,
    reduced.
    """

    def __init__(
        self, name: str, parameter: Tensor, chunks: Chunks, shard: Tensor | None = None
    ) -> None:
        self.name = name
        self.parameter = parameter
        self.chunks = chunks
        self.full = local_tensor(parameter)
        self.has_separate_shard = shard is not None
        self.shard = chunks.own(self.full) if shard is None else shard
        self.num_copies = count_copies(parameter)
        self.drop_gradients()

    def drop_gradients(self) -> None:
        self.parameter.grad = None
        self.summed: Tensor | None = None
        self.gradient: Tensor | None = None
        self.has_gradient = False
        self.is_reduced = True

    def take_gradient(self) -> None:
        """Add what a backward pass has left to the sum, in the dtype of the shard."""
        gradient, self.parameter.grad = self.parameter.grad, None
        if gradient is None:
            return
        self.has_gradient, self.is_reduced = True, False
        if self.summed is None:
            self.summed = gradient.to(self.shard.dtype)
        else:
            self.summed += gradient

    def full_gradient(self) -> Tensor:
        """The sum as a plain tensor; over `tp` it may be one of parts still, as norms' are."""
        summed, self.is_reduced = self.summed, True
        if summed is None:
            return torch.zeros_like(self.full, dtype=self.shard.dtype)
        if getattr(summed, "placements", None) != getattr(self.parameter, "placements", None):
            summed = summed.redistribute(placements=self.parameter.placements)
        self.summed = local_tensor(summed).contiguous()
        return self.summed


class Bucket:
    """Parameters that lie alike, each cut over the axis `fsdp` and replicated over `replica`."""

    def __init__(self, parts: Sequence[BucketParameter], mesh: DeviceMesh) -> None:
        self.parts = parts
        self.shards = _group(mesh, "fsdp")
        self.replicas = _group(mesh, "replica")
        self.num_replicas = mesh["replica"].size()
        self.widths = [part.chunks.width for part in parts]
        self.num_chunks = parts[0].chunks.num_chunks
        self.drop_gradients()

    def drop_gradients(self) -> None:
        for part in self.parts:
            part.drop_gradients()
        self.num_ready = 0
        self.reduced: Tensor | None = None
        self.total: Tensor | None = None

    @property
    def is_local(self) -> bool:
        """Whether nobody else has a part in it."""
        return self.num_chunks == 1 and self.num_replicas == 1

    def gather(self) -> Finish:
        """Begin to bring the shards of all ranks into the wholes. This rank's own shard is never
        written to: what an aborted collective leaves may be garbage."""
        if self.num_chunks == 1:
            return self._copy_shard
        sent = torch.cat([self._sent_shard(part) for part in self.parts])
        rows = sent.new_empty(self.num_chunks, len(sent))
        work = all_gather(rows.view(-1), sent, group=self.shards, async_op=True)

        def finish() -> None:
            nonlocal sent
            wait_for(work)
            del sent  # until here the collective reads it
            pairs: list[tuple[Tensor, Tensor]] = []
            for part, columns in zip(self.parts, rows.split(self.widths, dim=1), strict=True):
                in_place = -1 if part.has_separate_shard else part.chunks.index
                found = enumerate(part.chunks.unpadded(columns, part.full))
                pairs += [pair for index, pair in found if index != in_place]
            if pairs:
                targets, sources = zip(*pairs, strict=True)
                torch._foreach_copy_(targets, sources)

        return finish

    def reduce_shards(self, keeps_full: bool) -> Finish:
        """Begin to sum the gradients over the shards' ranks, and add this rank's part of them to
        `reduced`. Gradients of the whole are let go of, unless they are to be kept."""
        self.num_ready = 0
        full_rows = [part.chunks.padded(part.full_gradient()) for part in self.parts]
        found = self._gradient_flags().expand(self.num_chunks, -1)
        rows = torch.cat([*full_rows, found], dim=1)
        for part in () if keeps_full else self.parts:
            part.summed = None
        received = rows.new_empty(rows.shape[1])
        work = reduce_scatter(received, rows.view(-1), group=self.shards, async_op=True)

        def finish() -> None:
            nonlocal rows
            wait_for(work)
            del rows  # until here the collective reads it
            self.reduced = received if self.reduced is None else self.reduced.add_(received)

        return finish

    def reduce_full(self) -> Finish:
        """Begin to sum over the replicas what is not cut: the sum takes the gradients' embed_shard."""
        self.num_ready = 0
        if self.is_local:
            self._keep_full()
            return _no_wait
        full_rows = [part.full_gradient().view(-1) for part in self.parts]
        self.reduced = torch.cat([*full_rows, self._gradient_flags()])
        for part in self.parts:
            part.summed = None
        return self.reduce_replicas()

    def reduce_replicas(self) -> Finish:
        """Begin to sum `reduced` over the replicas, to be the `total`."""
        reduced, self.reduced = self.reduced, None
        if reduced is None:
            return _no_wait
        work = None
        if self.replicas is not None:
            work = dist.all_reduce(reduced, group=self.replicas, async_op=True)

        def finish() -> None:
            if work is not None:
                wait_for(work)
            self.total = reduced

        return finish

    def gradient_counts(self) -> Tensor:
        """On how many ranks each part has a gradient, once there is a total."""
        assert self.total is not None
        return self.total[sum(self.widths) :]

    def keep_gradients(self, gradient_counts: Sequence[float]) -> None:
        """Each part of which somebody has a gradient gets the sum. A module may leave out some of
        its parts for some samples; replicas would drift apart if only some stepped them."""
        assert self.total is not None
        total, self.total = self.total[: sum(self.widths)], None
        pieces = total.split(self.widths)
        for part, piece, found in zip(self.parts, pieces, gradient_counts, strict=True):
            if found:
                self._keep_gradient(part, piece[: part.shard.numel()].view_as(part.shard))

    def _gradient_flags(self) -> Tensor:
        """For each part, whether this rank has a gradient of it."""
        part = self.parts[0]
        told = [float(part.has_gradient) for part in self.parts]
        return torch.tensor(told, dtype=part.shard.dtype).to(part.full.device)

    def _keep_full(self) -> None:
        """There is nobody to sum with."""
        for part in (part for part in self.parts if part.has_gradient):
            full = part.full_gradient()
            part.gradient = full.to(part.shard.device)
            if part.gradient.device != full.device:
                part.summed = None

    def _keep_gradient(self, part: BucketParameter, piece: Tensor) -> None:
        """As a view of the whole gradient, where that is kept."""
        if part.summed is not None:
            piece = part.chunks.own(part.summed).copy_(piece)
        part.gradient = piece.to(part.shard.device)
        if part.gradient.device != piece.device:
            part.summed = None

    def _copy_shard(self) -> None:
        for part in self.parts:
            if part.has_separate_shard:
                part.full.copy_(part.shard)

    def _sent_shard(self, part: BucketParameter) -> Tensor:
        shard = part.shard.to(part.full.device, part.full.dtype)
        return _padded(shard, part.chunks.width)


def embed_shard(shard: Tensor, like: Tensor, chunks: Chunks) -> Tensor:
    """The whole of a parameter as `like` is, around a shard: in the shard's own storage if that
    is one of a whole with the shard in its embed_shard, else with a copy of it."""
    meta = local_tensor(like)
    in_place = (
        shard.is_contiguous()
        and shard.untyped_storage().nbytes() == meta.numel() * shard.itemsize
        and shard.storage_offset() == chunks.begin * prod(meta.shape[1:])
    )
    if in_place and shard.numel():
        full = shard.as_strided(meta.shape, meta.contiguous().stride(), 0)
    else:
        full = shard.new_empty(meta.shape)
        chunks.own(full).copy_(shard)
    return as_distributed(full, like)


def _padded(tensor: Tensor, num_elements: int) -> Tensor:
    flat = tensor.reshape(-1)
    missing = num_elements - flat.numel()
    return functional.pad(flat, (0, missing)) if missing else flat


def _group(mesh: DeviceMesh, axis: str) -> ProcessGroup | None:
    return mesh.get_group(axis) if mesh[axis].size() > 1 else None


def _no_wait() -> None:
    """There was nothing to wait for."""
