"""Buckets of parameters: all-gather of parameter shards and reduction of gradients, per bucket."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn import functional

from actors.distributed.flat_collectives import all_gather, reduce_scatter
from actors.distributed.stall import wait_for
from actors.distributed.torch_private import copy_tensors
from elastic.geometry.regions import chunk_interval
from pipelines.training.sharding.sharded import as_distributed, count_copies, local_tensor

Finish = Callable[[], None]
"""Waits for a collective that was started, and stores its result."""


class Chunks:
    """A local tensor of `shape`, cut along dim 0 as by `torch.chunk`, and this rank's chunk of it.

    `width` is the number of elements of a chunk, padding included. A tensor without dims cannot be
    cut: each rank's chunk is the whole, of which there are `num_copies`. Only rank 0 gets the sum
    of its gradient; see `share_uncut`.
    """

    def __init__(self, shape: Sequence[int], num_chunks: int, index: int) -> None:
        self.num_chunks = num_chunks
        self.index = index
        self.is_cut = len(shape) > 0
        self.num_copies = 1 if self.is_cut else num_chunks
        self.begin, self.length, self.width = 0, 1, 1
        if self.is_cut:
            self.begin, self.length = chunk_interval(shape[0], num_chunks, index)
            self.width = -(-shape[0] // num_chunks) * prod(shape[1:])

    def own(self, full: Tensor) -> Tensor:
        """This rank's chunk, as a view."""
        return full[self.begin : self.begin + self.length] if self.is_cut else full

    def padded(self, full: Tensor) -> Tensor:
        """All chunks in rows: (num_chunks, width)."""
        return _padded(full, self.num_chunks * self.width).view(self.num_chunks, self.width)

    def copies(self, rows: Tensor, full: Tensor, has_own: bool) -> list[tuple[Tensor, Tensor]]:
        """Pairs (target, source) that copy rows (num_chunks, width) into a full tensor, which
        `has_own` or lacks this rank's chunk."""
        if not self.is_cut:
            return [] if has_own else [(full.view(1), rows[self.index])]
        targets = full.view(-1).split(max(self.width, 1))
        return [
            (target, row[: target.numel()])
            for index, (target, row) in enumerate(zip(targets, rows, strict=False))
            if not has_own or index != self.index
        ]


class BucketParameter:
    """One parameter: the `full` tensor that this rank computes with, and its `shard`.

    The shard is a view of the full tensor, unless its dtype or device differs. `summed` is the
    gradient of the full tensor, summed over microbatches; `gradient` is the reduced gradient of the
    shard.
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
        self.num_copies = count_copies(parameter) * chunks.num_copies
        self.drop_gradients()

    def drop_gradients(self) -> None:
        self.parameter.grad = None
        self.summed: Tensor | None = None
        self.gradient: Tensor | None = None
        self.has_gradient = False
        self.is_reduced = True

    def take_gradient(self) -> None:
        """Move the gradient of a backward pass into the sum, in the dtype of the shard."""
        gradient, self.parameter.grad = self.parameter.grad, None
        if gradient is None:
            return
        self.has_gradient, self.is_reduced = True, False
        if self.summed is None:
            self.summed = gradient.to(self.shard.dtype)
        else:
            self.summed += gradient

    def full_gradient(self) -> Tensor:
        """The sum as a plain tensor; over `tp` it may still be partial, as for norms."""
        summed, self.is_reduced = self.summed, True
        if summed is None:
            return torch.zeros_like(self.full, dtype=self.shard.dtype)
        parameter = self.parameter
        if (
            isinstance(summed, DTensor)
            and isinstance(parameter, DTensor)
            and summed.placements != parameter.placements
        ):
            summed = summed.redistribute(placements=parameter.placements)
        self.summed = local_tensor(summed).contiguous()
        return self.summed


class Bucket:
    """Parameters of one mesh, each sharded over axis `fsdp` and replicated over `replica`."""

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
        """Whether no other rank shards or replicates these parameters."""
        return self.num_chunks == 1 and self.num_replicas == 1

    def gather(self) -> Finish:
        """Start the all-gather of the shards into the full parameters.

        This rank's own shard is never written: an aborted collective may leave garbage.
        """
        if self.num_chunks == 1:
            return self._copy_shard
        sent = torch.cat([self._sent_shard(part) for part in self.parts])
        rows = sent.new_empty(self.num_chunks, len(sent))
        work = all_gather(rows.view(-1), sent, group=self.shards, async_op=True)

        def finish() -> None:
            nonlocal sent
            wait_for(work)
            del sent  # the collective reads it until here
            pairs: list[tuple[Tensor, Tensor]] = []
            for part, columns in zip(self.parts, rows.split(self.widths, dim=1), strict=True):
                pairs += part.chunks.copies(columns, part.full, not part.has_separate_shard)
            if pairs:
                targets, sources = zip(*pairs, strict=True)
                copy_tensors(targets, sources)

        return finish

    def reduce_shards(self, keeps_full: bool) -> Finish:
        """Start the reduce-scatter of the gradients over `fsdp`; this rank's shard is added to
        `reduced`. Full gradients are released unless `keeps_full`."""
        self.num_ready = 0
        full_rows = [part.chunks.padded(part.full_gradient()) for part in self.parts]
        flags = self._gradient_flags().expand(self.num_chunks, -1)
        rows = torch.cat([*full_rows, flags], dim=1)
        for part in () if keeps_full else self.parts:
            part.summed = None
        received = rows.new_empty(rows.shape[1])
        work = reduce_scatter(received, rows.view(-1), group=self.shards, async_op=True)

        def finish() -> None:
            nonlocal rows
            wait_for(work)
            del rows  # the collective reads it until here
            self.reduced = received if self.reduced is None else self.reduced.add_(received)

        return finish

    def reduce_full(self) -> Finish:
        """Start the all-reduce of unsharded gradients over the replicas; the sum replaces them."""
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
        """Start the all-reduce of `reduced` over the replicas; the result is `total`."""
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

    def uncut_sums(self) -> list[Tensor]:
        """The sums of the parameters that cannot be cut, as views of `total`."""
        if self.total is None or self.num_chunks == 1:
            return []
        sums = self.total.split([*self.widths, len(self.parts)])
        return [sums[i] for i, part in enumerate(self.parts) if not part.chunks.is_cut]

    def gradient_counts(self) -> Tensor:
        """The number of ranks with a gradient of each parameter; needs `total`."""
        assert self.total is not None
        return self.total[sum(self.widths) :]

    def keep_gradients(self, gradient_counts: Sequence[float]) -> None:
        """Assign the sum to each parameter that has a gradient on any rank.

        A module may skip some of its parameters for some samples; replicas would diverge if only
        some of them stepped those parameters.
        """
        assert self.total is not None
        total, self.total = self.total[: sum(self.widths)], None
        pieces = total.split(self.widths)
        for part, piece, count in zip(self.parts, pieces, gradient_counts, strict=True):
            if count:
                self._keep_gradient(part, piece[: part.shard.numel()].view_as(part.shard))

    def _gradient_flags(self) -> Tensor:
        """For each parameter, 1 if this rank has a gradient of it, else 0."""
        first = self.parts[0]
        flags = [float(part.has_gradient) for part in self.parts]
        return torch.tensor(flags, dtype=first.shard.dtype).to(first.full.device)

    def _keep_full(self) -> None:
        """Assign the local gradients: there is no other rank to reduce with."""
        for part in (part for part in self.parts if part.has_gradient):
            full = part.full_gradient()
            part.gradient = full.to(part.shard.device)
            if part.gradient.device != full.device:
                part.summed = None

    def _keep_gradient(self, part: BucketParameter, piece: Tensor) -> None:
        """Assign a gradient, as a view of the full gradient if that is kept."""
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


def share_uncut(buckets: Sequence[Bucket]) -> Finish:
    """Give all ranks of `fsdp` the sums of the gradients that cannot be cut, which rank 0 has.

    Each rank updates these parameters, so all need the same bits. Only dense parameters may be
    without dims, so the buckets that have some share their group.
    """
    having = [bucket for bucket in buckets if bucket.uncut_sums()]
    if not having:
        return _no_wait
    sums = [value for bucket in having for value in bucket.uncut_sums()]
    shared = torch.cat(sums)
    work = dist.broadcast(shared, group=having[0].shards, group_src=0, async_op=True)

    def finish() -> None:
        wait_for(work)
        for target, value in zip(sums, shared.split(1), strict=True):
            target.copy_(value)

    return finish


def embed_shard(shard: Tensor, like: Tensor, chunks: Chunks) -> Tensor:
    """A full parameter, distributed as `like`, that contains a shard at its position.

    It reuses the shard's storage if that has the full size and the shard at the right offset;
    otherwise it copies the shard.
    """
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
    """The `Finish` of a collective that was not needed."""
