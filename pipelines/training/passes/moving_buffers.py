"""Buffers that forward passes change, such as BatchNorm's: changed once a step, alike on all ranks.

Each microbatch begins with the buffers as they were before the step, and apply makes them the mean
of what the microbatches made of them. For a running average that is its plain update with the
mean of the microbatches' statistics. So nothing changes before the vote has been read, and the
layout makes no difference.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup, Work

from actors.distributed.stall import wait_for


class BufferGroup:
    """Buffers of one dtype, side by side in memory, so that a pass costs a few operations however
    many there are."""

    def __init__(self, kept: Mapping[str, Tensor]) -> None:
        self.before = torch.cat([value.detach().flatten() for value in kept.values()])
        self.updated = torch.empty_like(self.before)
        self.sums = torch.zeros_like(self.before, dtype=torch.float64)
        parts = self.updated.split([value.numel() for value in kept.values()])
        # `data`: views count their changes together, and one buffer's would spoil for autograd what
        # it has kept of another.
        self.copies = {
            name: part.view_as(value).data
            for (name, value), part in zip(kept.items(), parts, strict=True)
        }

    def updated_with(self, replaced: Mapping[str, Tensor]) -> Tensor:
        """What a pass has made, where it has put other tensors in the places of some copies."""
        if not replaced.keys() & self.copies.keys():
            return self.updated
        given = [replaced.get(name, copy) for name, copy in self.copies.items()]
        return torch.cat([one.detach().flatten().to(self.updated) for one in given])

    def named_sums(self) -> dict[str, Tensor]:
        parts = self.sums.split([copy.numel() for copy in self.copies.values()])
        return dict(zip(self.copies, parts, strict=True))


class MovingBuffers:
    """Those of one rank's modules. A buffer that changes at all has to do so in the first step of a
    generation, as any running average does."""

    def __init__(self, modules: Sequence[nn.Module], ranks: ProcessGroup) -> None:
        """What the passes make of them is summed over these ranks."""
        self.modules = modules
        self.ranks = ranks
        self.kept: dict[str, Tensor] = {}
        self.moving: list[str] | None = None
        """The names of those that change; None before a step has shown it."""
        self._places: dict[str, tuple[dict[str, Tensor | None], str]] = {}

    def keep(self, buffers: Mapping[str, Tensor]) -> None:
        """These, which the modules hold, are part of the state: only `apply` changes them."""
        self.kept = dict(buffers)
        self.moving = None if buffers else []
        for name in buffers:
            owner, _, key = name.rpartition(".")
            holders = (module for module in self.modules if _has(module, owner, key))
            self._places[name] = (next(holders).get_submodule(owner)._buffers, key)

    @torch.no_grad()
    def begin(self) -> None:
        """Before the passes of a step, which change copies."""
        names = list(self.kept) if self.moving is None else self.moving
        by_dtype: dict[torch.dtype, dict[str, Tensor]] = {}
        for name in names:
            by_dtype.setdefault(self.kept[name].dtype, {})[name] = self.kept[name]
        self._groups = [BufferGroup(kept) for kept in by_dtype.values()]
        self._copies = {name: copy for one in self._groups for name, copy in one.copies.items()}
        self._num_passes = torch.zeros((), dtype=torch.float64)
        self._changed = dict.fromkeys(names, False)
        self._has_replaced = False
        self._pending: tuple[Work, list[Tensor]] | None = None
        self._means: dict[str, Tensor] = {}
        self._install(self._copies)

    def begin_pass(self) -> None:
        """Before the forward pass of a microbatch."""
        for one in self._groups:
            one.updated.copy_(one.before)
        if self._has_replaced:
            self._install(self._copies)

    def end_pass(self, num_tokens: Tensor, is_last: bool) -> None:
        """After the forward pass of a microbatch with so many tokens: without any, it counts
        nothing. While the step's last backward goes on, the sums are on their way."""
        if not self._copies:
            return
        replaced = self._replaced()
        self._has_replaced = self._has_replaced or bool(replaced)
        counts = num_tokens > 0
        if not num_tokens.is_cpu:
            self._num_passes = self._num_passes.to(counts.device) + counts
            for one in self._groups:
                one.sums += torch.where(counts, one.updated_with(replaced), 0)
        elif counts:
            self._num_passes += 1
            for one in self._groups:
                one.sums += one.updated_with(replaced)
        for name, copy in self._copies.items() if self.moving is None else ():
            # By value: BatchNorm writes past the counter of versions that autograd has.
            value = replaced.get(name, copy)
            self._changed[name] = self._changed[name] or not torch.equal(value, self.kept[name])
        if is_last and self.moving:
            self._begin_sum(self.moving)

    @torch.no_grad()
    def reduce(self) -> None:
        """After the passes of a step, what is the sum over all ranks: one collective, and none if
        no buffer changes. In the first step another one tells which do."""
        self._install(self.kept)  # not before: a backward that recomputes changes them, too
        if self.moving is None:
            told = torch.tensor([float(one) for one in self._changed.values()])
            told = told.to(self._num_passes.device)
            wait_for(self.ranks.allreduce([told]))
            self.moving = [n for n, one in zip(self._changed, told.tolist(), strict=True) if one]
            if self.moving:
                self._begin_sum(self.moving)
        if self._pending is None:
            return
        (work, [num_passes, *sums]), self._pending = self._pending, None
        wait_for(work)
        self._means = {
            name: total.view_as(self.kept[name]) / num_passes.squeeze()
            for name, total in zip(self.moving, sums, strict=True)
        }

    @torch.no_grad()
    def apply(self) -> None:
        """Make the buffers what the step's microbatches have made of them, on average."""
        for name, mean in self._means.items():
            kept = self.kept[name]
            kept.copy_(mean if kept.is_floating_point() else mean.round())
        self._means = {}

    def _begin_sum(self, names: Sequence[str]) -> None:
        named_sums = {name: sums for one in self._groups for name, sums in one.named_sums().items()}
        parts = [self._num_passes.view(1), *(named_sums[name] for name in names)]
        flat = torch.cat(parts)
        work = self.ranks.allreduce([flat])
        self._pending = work, list(flat.split([part.numel() for part in parts]))

    def _install(self, buffers: Mapping[str, Tensor]) -> None:
        for name, value in buffers.items():
            place, key = self._places[name]
            place[key] = value

    def _replaced(self) -> dict[str, Tensor]:
        """What a forward pass has put where copies were. The copies stay as they are: its
        backward may want them."""
        replaced = {}
        for name, copy in self._copies.items():
            place, key = self._places[name]
            value = place[key]
            if value is not copy:
                assert value is not None, f"{name}: the forward pass has taken it away"
                replaced[name] = value
        return replaced


def _has(module: nn.Module, owner: str, key: str) -> bool:
    try:
        return hasattr(module.get_submodule(owner), key)
    except AttributeError:
        return False
