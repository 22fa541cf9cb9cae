"""An audit: the checksums of what each rank holds, gathered and compared; runs without Ray."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from actors.distributed.stall import wait_for
from actors.runtime.program import Groups
from elastic.controller.audit import compare
from elastic.geometry.shard_map import region_of
from elastic.geometry.tensor_specs import TensorSpec
from elastic.protocol.events import Audited

ROW = 1024
"""Elements that are summed before they are weighed by where they lie."""
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
ODD = 0x9E3779B97F4A7C15 - 2**64
"""An odd number with as many ones as zeros (2^64 by the golden ratio), as int64 has it."""


class Audit:
    """One rank's audits in one generation: one all-reduce each."""

    def __init__(self, groups: Groups, specs: Sequence[TensorSpec], every: int) -> None:
        self.groups = groups
        self._every = every
        self._part = _part(groups, specs) if every else 0
        self._fewest: int | None = None

    def is_due(self, step: int) -> bool:
        """After each so many steps; once a generation where there is nothing to compare."""
        return bool(self._every) and step % self._every == 0 and self._fewest != 1

    def compare(self, step: int, tensors: Mapping[str, Tensor]) -> Audited:
        """Ranks that hold the same regions are replicas: all of their bits must be equal."""
        groups = self.groups
        told = torch.zeros(groups.layout.num_workers, 2, dtype=torch.int64, device=groups.device)
        own = [self._part, checksum(tensors)]
        told[groups.world_rank] = torch.tensor(own, dtype=torch.int64)
        wait_for(groups.world.allreduce([told]))
        parts, sums = told.T.tolist()
        self._fewest, splits = compare(groups.assignment.members, parts, sums)
        return Audited(groups.assignment.generation, step, self._fewest, splits)


def checksum(tensors: Mapping[str, Tensor]) -> int:
    """A number that differs whenever one bit does, and nearly always when several do."""
    names = sorted(name for name, tensor in tensors.items() if tensor.numel())
    sums = {name: _sum(tensors[name].detach()) for name in names}
    return _digest([(name, int(one)) for name, one in sums.items()])


def _part(groups: Groups, specs: Sequence[TensorSpec]) -> int:
    """A number for the regions that this rank holds."""
    return _digest([(spec.name, region_of(spec, groups.layout, groups.place)) for spec in specs])


def _sum(tensor: Tensor) -> Tensor:
    """Of the elements' bits as integers, modulo 2^64. Those of a row of elements are added up; the
    sums of the rows are weighed by odd numbers, so that a bit that changes one changes the whole.
    Shape (), on the tensor's device."""
    bits = tensor.contiguous().view(-1).view(INTEGERS[tensor.itemsize])
    num_rows = bits.numel() // ROW
    rows = bits[: num_rows * ROW].view(num_rows, ROW).sum(1, dtype=torch.int64)
    rest = bits[num_rows * ROW :].sum(dtype=torch.int64).view(1)
    sums = torch.cat([rows, rest])
    weights = torch.arange(1, 2 * num_rows + 2, 2, device=sums.device).mul_(ODD)
    return sums.mul_(weights).sum()


def _digest(told: object) -> int:
    found = hashlib.blake2b(repr(told).encode(), digest_size=8).digest()
    return int.from_bytes(found, "little", signed=True)
