"""Replica audit: checksums of every rank's state, gathered and compared. Runs without Ray."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from actors.distributed.stall import wait_for
from actors.runtime.program import Groups
from elastic.controller.audit import compare
from elastic.geometry.shard_map import region_of
from elastic.geometry.tensor_specs import TensorSpec
from elastic.protocol.events import Audited

ROW = 1024
"""Elements that are summed before the sum is weighted by its position."""
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
ODD = 0x9E3779B97F4A7C15 - 2**64
"""2^64 divided by the golden ratio, as int64: odd, with irregular bits (38 of 64 are ones)."""


class Audit:
    """One rank's audits in one generation; each audit costs one all-reduce."""

    def __init__(self, groups: Groups, specs: Sequence[TensorSpec], every: int) -> None:
        self.groups = groups
        self._every = every
        compared = [spec for spec in specs if spec.kind != "script"]
        self._part = _part(groups, compared) if every else 0
        self._names = {spec.name for spec in compared}
        self._fewest: int | None = None

    def is_due(self, step: int) -> bool:
        """Whether to audit after this step: every `every` steps, but only once in a generation that
        has no replicas to compare."""
        return bool(self._every) and step % self._every == 0 and self._fewest != 1

    def compare(
        self, step: int, tensors: Mapping[str, Tensor], interrupt: Callable[[], None]
    ) -> Audited:
        """Compare replicas. Ranks that hold the same regions must be equal in every bit."""
        groups = self.groups
        rows = torch.zeros(groups.layout.num_workers, 2, dtype=torch.int64, device=groups.device)
        compared = {name: tensor for name, tensor in tensors.items() if name in self._names}
        local_row = [self._part, checksum(compared)]
        rows[groups.world_rank] = torch.tensor(local_row, dtype=torch.int64)
        wait_for(groups.world.allreduce([rows]))
        parts, sums = rows.T.tolist()
        interrupt()  # an aborted reduction may have returned garbage
        self._fewest, splits = compare(groups.assignment.members, parts, sums)
        return Audited(groups.assignment.generation, step, self._fewest, splits)


def checksum(tensors: Mapping[str, Tensor]) -> int:
    """A checksum that detects every one-bit difference, and nearly all others."""
    names = sorted(name for name, tensor in tensors.items() if tensor.numel())
    sums = {name: _sum(tensors[name].detach()) for name in names}
    return _digest([(name, int(total)) for name, total in sums.items()])


def _part(groups: Groups, specs: Sequence[TensorSpec]) -> int:
    """A digest of the regions that this rank holds."""
    return _digest([(spec.name, region_of(spec, groups.layout, groups.place)) for spec in specs])


def _sum(tensor: Tensor) -> Tensor:
    """The weighted sum of the elements' bits as integers, modulo 2^64. The elements of a row are
    added. Each row sum is weighted by an odd number, so that a changed bit changes the result.
    Shape (), on the tensor's device."""
    bits = tensor.contiguous().view(-1).view(INTEGERS[tensor.itemsize])
    num_rows = bits.numel() // ROW
    rows = bits[: num_rows * ROW].view(num_rows, ROW).sum(1, dtype=torch.int64)
    rest = bits[num_rows * ROW :].sum(dtype=torch.int64).view(1)
    sums = torch.cat([rows, rest])
    weights = torch.arange(1, 2 * num_rows + 2, 2, device=sums.device).mul_(ODD)
    return sums.mul_(weights).sum()


def _digest(value: object) -> int:
    digest = hashlib.blake2b(repr(value).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)
