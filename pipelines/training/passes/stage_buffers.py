"""Buffers that forward passes change, in a pipeline: its stages have different ones, and passes of
one microbatch begin before those of another are over.

What counts is as in `pipelines.training.passes.moving_buffers`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from actors.distributed.stall import wait_for


class StageBuffers:
    """Those of one rank's stages, of all that there are `everywhere`. A buffer that changes at all
    has to do so in the first step of a generation."""

    def __init__(
        self,
        modules: Sequence[nn.Module],
        everywhere: Mapping[str, Tensor],
        ranks: ProcessGroup,
        device: torch.device,
    ) -> None:
        """What the passes make of them is summed over these ranks."""
        self.modules = modules
        self.ranks = ranks
        self.sizes = {name: one.numel() for name, one in everywhere.items()}
        self.device = device
        self.places: dict[str, tuple[int, nn.Module, str]] = {}
        self.kept: dict[str, Tensor] = {}
        self.moving: list[str] | None = None
        """The names of those that change, on any rank; None before a step has shown it."""

    def keep(self, buffers: Mapping[str, Tensor]) -> None:
        """These, which the modules hold, are part of the state: only `apply` changes them."""
        self.kept = dict(buffers)
        self.moving = None if self.sizes else []
        for name in buffers:
            owner, _, key = name.rpartition(".")
            there = (dict(module.named_buffers(remove_duplicate=False)) for module in self.modules)
            number = next(n for n, those in enumerate(there) if name in those)
            self.places[name] = (number, self.modules[number].get_submodule(owner), key)

    def begin(self) -> None:
        """Before the passes of a step."""
        known = self.kept if self.moving is None else self.moving
        self._stage_sums = [
            _StageSums({name: self.kept[name] for name in known if self._is_in_stage(name, n)}, self.device)
            for n in range(len(self.modules))
        ]
        self._means: dict[str, Tensor] = {}

    def begin_pass(self, number: int) -> None:
        """Before the forward pass of a microbatch through a stage: it changes copies, and new
        ones, since the backward pass of another may still want its own."""
        stage = self._stage_sums[number]
        stage.copies = {name: value.clone() for name, value in stage.kept.items()}
        self._install(stage.copies)

    @torch.no_grad()
    def end_pass(self, num_samples: int, number: int) -> None:
        """After the forward pass of a microbatch with so many samples: without any, it counts
        nothing."""
        if self._stage_sums[number].copies:
            values = {name: self._current(name) for name in self._stage_sums[number].copies}
            self._stage_sums[number].add(values, num_samples > 0, tracks_changes=self.moving is None)

    @torch.no_grad()
    def reduce(self) -> None:
        """After the passes of a step, sum over all ranks: one collective, and none if no buffer
        changes. In the first step another one tells which do."""
        self._install(self.kept)  # not before: a backward that recomputes changes them, too
        if self.moving is None:
            changed = {name for stage in self._stage_sums for name in stage.changed}
            told = torch.tensor([float(name in changed) for name in self.sizes])
            told = told.to(self.device)
            wait_for(self.ranks.allreduce([told]))
            self.moving = [n for n, one in zip(self.sizes, told.tolist(), strict=True) if one]
        if not self.moving:
            return
        own = {name: sums for stage in self._stage_sums for name, sums in stage.named_sums().items()}
        widths = [1 + self.sizes[name] for name in self.moving]
        parts = zip(self.moving, widths, strict=True)
        flat = torch.cat([own[n] if n in own else self._zeros(width) for n, width in parts])
        wait_for(self.ranks.allreduce([flat]))
        self._means = {
            name: sums[1:].view_as(self.kept[name]) / sums[0]
            for name, sums in zip(self.moving, flat.split(widths), strict=True)
            if name in self.kept
        }

    @torch.no_grad()
    def apply(self) -> None:
        """Make the buffers what the step's microbatches have stage of them, on average."""
        for name, mean in self._means.items():
            kept = self.kept[name]
            kept.copy_(mean if kept.is_floating_point() else mean.round())
        self._means = {}

    def _install(self, buffers: Mapping[str, Tensor]) -> None:
        for name, value in buffers.items():
            _, owner, key = self.places[name]
            setattr(owner, key, value)

    def _current(self, name: str) -> Any:
        _, owner, key = self.places[name]
        return getattr(owner, key)

    def _is_in_stage(self, name: str, number: int) -> bool:
        return name in self.places and self.places[name][0] == number

    def _zeros(self, width: int) -> Tensor:
        return torch.zeros(width, dtype=torch.float64, device=self.device)


class _StageSums:
    """What the passes of a step through one module have stage of its buffers, in float64."""

    def __init__(self, kept: dict[str, Tensor], device: torch.device) -> None:
        self.kept = kept
        self.copies: dict[str, Tensor] = {}
        self.changed: set[str] = set()
        size = sum(value.numel() for value in kept.values())
        self.sums = torch.zeros(size, dtype=torch.float64, device=device)
        self.num_passes = torch.zeros(1, dtype=torch.float64, device=device)

    def add(self, values: Mapping[str, Tensor], counts: bool, tracks_changes: bool) -> None:
        """Those after one more pass, if it counts; `tracks_changes` for which of them it has changed."""
        if counts:
            self.sums += torch.cat([one.flatten().double() for one in values.values()])
            self.num_passes += 1
        for name, value in values.items() if tracks_changes else ():
            # By value: BatchNorm writes past the counter of versions that autograd has.
            if value is not self.copies[name] or not torch.equal(value, self.kept[name]):
                self.changed.add(name)

    def named_sums(self) -> dict[str, Tensor]:
        """Of each how many passes, and the sum over them, in a row."""
        pieces = self.sums.split([value.numel() for value in self.kept.values()])
        return {
            name: torch.cat([self.num_passes, piece])
            for name, piece in zip(self.kept, pieces, strict=True)
        }
