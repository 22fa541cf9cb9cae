"""Parameters that one rank of `fsdp` updates whole, as Muon and Adafactor need."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from actors.distributed.backends.waiting import launching
from actors.distributed.stall import wait_for
from actors.runtime.program import Groups, Interrupt
from elastic.geometry.regions import chunk_interval
from elastic.geometry.tensor_specs import Ownership
from pipelines.training.sharding.sharded import Sharded, on_host, storage_bytes


class OwnedSharded:
    """Sharded modules some of whose parameters have an owner; see `Sharded`.

    The state of such a parameter is the owner's whole tensor. The parts with which the ranks
    compute are copies: a step distributes them before its first forward. After its last backward
    it collects the parts of the gradient at the owner. So apply runs no collective, and nothing
    changes a parameter before the vote.
    """

    def __init__(
        self,
        parts: Sharded,
        ownerships: Mapping[str, Ownership],
        groups: Groups,
        offload: bool = False,
    ) -> None:
        """`ownerships` are those of the whole model; the modules may have some of its parameters.

        Takes modules on the meta device: shapes without values.
        """
        self.parts = parts
        self.modules = parts.modules
        self.device = groups.device
        self.offload = offload
        self._group = groups.mesh.get_group("fsdp")
        self._num_ranks, self._rank = self._group.size(), self._group.rank()
        shards = parts.shards()
        self._shapes = {
            name: tuple(parameter.shape)
            for module in self.modules
            for name, parameter in module.named_parameters()
            if name in shards and name in ownerships
        }
        num_stages = groups.layout.pp * groups.layout.vp
        self._names: list[list[str]] = [[] for _ in range(self._num_ranks)]
        """The names of the parameters that each rank owns."""
        for name in self._shapes:
            owner = ownerships[name].rank(self._num_ranks, num_stages)
            self._names[owner].append(name)
        self._wholes = {
            name: shards[name].new_empty(
                shape if name in self._names[self._rank] else (0, *shape[1:])
            )
            for name, shape in self._shapes.items()
        }
        """The whole parameters that this rank owns, and empty tensors for those of the others."""
        self._gradients: dict[str, Tensor] = {}
        self._is_stale = True

    @property
    def elsewhere(self) -> Mapping[str, tuple[int, ...]]:
        own = self._names[self._rank]
        return {name: shape for name, shape in self._shapes.items() if name not in own}

    def shards(self) -> dict[str, Tensor]:
        return self.parts.shards() | self._wholes

    def num_copies(self) -> dict[str, int]:
        return self.parts.num_copies()

    @torch.no_grad()
    def adopt(self, shards: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> None:
        self._wholes = {
            name: on_host(shards[name], self.device) if self.offload else shards[name]
            for name in self._shapes
        }
        empty = {
            name: shards[name].new_empty(self._part_shape(name, self._rank))
            for name in self._shapes
        }
        self.parts.adopt(dict(shards) | empty, buffers)
        self._is_stale = True

    @torch.no_grad()
    def gather(self, interrupt: Interrupt) -> None:
        if self._is_stale:
            self._distribute(interrupt)
            self._is_stale = False
        self.parts.gather(interrupt)

    def accumulate(self, last: bool) -> None:
        self.parts.accumulate(last)

    def sum_gradients(self, number: int) -> None:
        self.parts.sum_gradients(number)

    @torch.no_grad()
    def reduce(self, interrupt: Interrupt) -> None:
        self.parts.reduce(interrupt)
        self._gradients = self._collect(interrupt)
        self.parts.drop_gradients(self._shapes.__contains__)

    def gradients(self) -> dict[str, Tensor]:
        return self.parts.gradients() | self._gradients

    def drop_gradients(self, chosen: Callable[[str], bool] | None = None) -> None:
        self.parts.drop_gradients(chosen)
        self._gradients = {
            name: value
            for name, value in self._gradients.items()
            if chosen is not None and not chosen(name)
        }

    def after_step(self) -> None:
        self.parts.after_step()
        self._is_stale = True

    def release(self) -> None:
        self.parts.release()

    def resident_tensors(self) -> Iterable[Tensor]:
        return chain(self.parts.resident_tensors(), self._wholes.values())

    def gradient_bytes(self) -> int:
        return self.parts.gradient_bytes() + storage_bytes(self._wholes.values(), self.device)

    def _distribute(self, interrupt: Interrupt) -> None:
        """Give each rank its part of each whole parameter."""
        interrupt()
        local = self.parts.shards()
        sent = [
            [self._part(self._wholes[name], name, rank) for name in self._names[self._rank]]
            for rank in range(self._num_ranks)
        ]
        sizes = [[local[name].numel() for name in names] for names in self._names]
        for names, values in zip(self._names, self._exchanged(sent, sizes), strict=True):
            for name, value in zip(names, values, strict=True):
                local[name].copy_(value.view_as(local[name]))
        self.parts.after_step()

    def _collect(self, interrupt: Interrupt) -> dict[str, Tensor]:
        """The whole gradients of the parameters that this rank owns, from the parts of all.

        All ranks have gradients of the same parameters.
        """
        interrupt()
        gradients = self.parts.gradients()
        sent = [[gradients[n] for n in names if n in gradients] for names in self._names]
        owned = [name for name in self._names[self._rank] if name in gradients]
        sizes = [
            [prod(self._part_shape(name, rank)) for name in owned]
            for rank in range(self._num_ranks)
        ]
        received = self._exchanged(sent, sizes)
        return {
            name: torch.cat(pieces).view(self._shapes[name]).to(self._wholes[name].device)
            for name, pieces in zip(owned, zip(*received, strict=True), strict=True)
        }

    def _exchanged(
        self, sent: Sequence[Sequence[Tensor]], sizes: Sequence[Sequence[int]]
    ) -> list[tuple[Tensor, ...]]:
        """Send tensors to each rank; from each receive flat tensors of these sizes."""
        flat = [tensor.reshape(-1) for tensors in sent for tensor in tensors]
        like = next(iter(self._wholes.values()))
        outgoing = torch.cat(flat) if flat else like.new_empty(0)
        incoming = torch.empty(sum(map(sum, sizes)), dtype=like.dtype, device=self.device)
        to_each = [sum(tensor.numel() for tensor in tensors) for tensors in sent]
        from_each = [sum(from_one) for from_one in sizes]
        work = launching(
            dist.all_to_all_single,
            incoming,
            outgoing.to(self.device, like.dtype),
            from_each,
            to_each,
            group=self._group,
            async_op=True,
        )
        wait_for(work)
        received = incoming.split(from_each)
        return [part.split(list(own)) for part, own in zip(received, sizes, strict=True)]

    def _part(self, whole: Tensor, name: str, rank: int) -> Tensor:
        """The part of a whole tensor with which a rank computes."""
        begin, length = chunk_interval(self._shapes[name][0], self._num_ranks, rank)
        return whole[begin : begin + length]

    def _part_shape(self, name: str, rank: int) -> tuple[int, ...]:
        shape = self._shapes[name]
        _, length = chunk_interval(shape[0], self._num_ranks, rank)
        return (length, *shape[1:])
