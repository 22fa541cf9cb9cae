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
from torch.distributed import ProcessGroup

from actors.standstill import wait_for


class MovingBuffers:
    """Those of one rank's modules. A buffer that changes at all has to do so in the first step of a
    generation, as any running average does."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.modules = modules
        self.places: dict[str, tuple[nn.Module, str]] = {}
        self.kept: dict[str, Tensor] = {}
        self.moving: list[str] | None = None
        """The names of those that change; None before a step has shown it."""

    def keep(self, buffers: Mapping[str, Tensor]) -> None:
        """These, which the modules hold, are part of the state: only `apply` changes them."""
        self.kept = dict(buffers)
        self.moving = None if buffers else []
        for name in buffers:
            owner, _, key = name.rpartition(".")
            holders = (module for module in self.modules if _has(module, owner, key))
            self.places[name] = (next(holders).get_submodule(owner), key)

    def begin(self) -> None:
        """Before the passes of a step."""
        names = list(self.kept) if self.moving is None else self.moving
        self._num_passes = torch.zeros((), dtype=torch.float64)
        self._copies: dict[str, Tensor] = {}
        self._changed = dict.fromkeys(names, False)
        flat = [torch.zeros(0, dtype=torch.float64), *(self.kept[name].flatten() for name in names)]
        self._sums = torch.zeros_like(torch.cat([one.to(flat[-1].device) for one in flat]))
        self._reduced: dict[str, Tensor] = {}

    def begin_pass(self) -> None:
        """Before the forward pass of a microbatch: it changes copies."""
        if not self._copies:
            self._copies = {name: self.kept[name].clone() for name in self._changed}
            self._give(self._copies)
            return
        torch._foreach_copy_(list(self._copies.values()), [self.kept[n] for n in self._copies])
        self._give({n: c for n, c in self._copies.items() if getattr(*self.places[n]) is not c})

    @torch.no_grad()
    def end_pass(self, num_tokens: Tensor) -> None:
        """After the forward pass of a microbatch with so many tokens: without any, it counts
        nothing."""
        if not self._copies:
            return
        counts = num_tokens > 0
        made = {name: getattr(*self.places[name]) for name in self._copies}
        flat = torch.cat([self._sums[:0], *(one.flatten() for one in made.values())])
        self._sums += torch.where(counts, flat, 0.0)
        self._num_passes = self._num_passes.to(counts.device) + counts
        for name, copy in self._copies.items() if self.moving is None else ():
            # By value: BatchNorm writes past the counter of versions that autograd has.
            changed = made[name] is not copy or not torch.equal(made[name], self.kept[name])
            self._changed[name] = self._changed[name] or changed

    @torch.no_grad()
    def reduce(self, ranks: ProcessGroup) -> None:
        """After the passes of a step, sum over these ranks: one collective, and none if no buffer
        changes. In the first step another one tells which do."""
        self._give(self.kept)  # not before: a backward that recomputes changes them, too
        if self.moving is None:
            told = torch.tensor([float(one) for one in self._changed.values()])
            told = told.to(self._num_passes.device)
            wait_for(ranks.allreduce([told]))
            self.moving = [n for n, one in zip(self._changed, told.tolist(), strict=True) if one]
        if not self.moving:
            return
        split = self._sums.split([self.kept[name].numel() for name in self._changed])
        sums_of = dict(zip(self._changed, split, strict=True))
        parts = [self._num_passes.view(1), *(sums_of[name] for name in self.moving)]
        flat = torch.cat(parts)
        wait_for(ranks.allreduce([flat]))
        num_passes, *sums = flat.split([part.numel() for part in parts])
        self._reduced = {
            name: total.view_as(self.kept[name]) / num_passes.squeeze()
            for name, total in zip(self.moving, sums, strict=True)
        }

    @torch.no_grad()
    def apply(self) -> None:
        """Make the buffers what the step's microbatches have made of them, on average."""
        for name, mean in self._reduced.items():
            kept = self.kept[name]
            kept.copy_(mean if kept.is_floating_point() else mean.round())
        self._reduced = {}

    def _give(self, buffers: Mapping[str, Tensor]) -> None:
        for name, value in buffers.items():
            owner, key = self.places[name]
            setattr(owner, key, value)


def _has(module: nn.Module, owner: str, key: str) -> bool:
    try:
        return hasattr(module.get_submodule(owner), key)
    except AttributeError:
        return False
