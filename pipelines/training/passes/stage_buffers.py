"""Buffers that forward passes update, in a pipeline.

Stages have different buffers, and the passes of microbatches overlap. The rules are those of
`pipelines.training.passes.running_buffers`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from actors.distributed.stall import wait_for


class StageBuffers:
    """The updated buffers of one rank's stages; `all_buffers` has the buffers of all stages.

    A buffer that passes update must change in the first step of a generation.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        all_buffers: Mapping[str, Tensor],
        ranks: ProcessGroup,
        device: torch.device,
    ) -> None:
        """Take the modules, and the ranks over which the results of the passes are summed."""
        self.modules = modules
        self.ranks = ranks
        self.sizes = {name: value.numel() for name, value in all_buffers.items()}
        self.device = device
        self.owners: dict[str, tuple[int, nn.Module, str]] = {}
        self.buffers: dict[str, Tensor] = {}
        self.moving: list[str] | None = None
        """The names of the buffers that passes update on any rank; None before the first step."""

    def keep(self, buffers: Mapping[str, Tensor]) -> None:
        """Take the modules' buffers that are part of the state; only `apply` changes them."""
        self.buffers = dict(buffers)
        self.moving = None if self.sizes else []
        for name in buffers:
            owner, _, key = name.rpartition(".")
            named = (dict(module.named_buffers(remove_duplicate=False)) for module in self.modules)
            number = next(n for n, of_stage in enumerate(named) if name in of_stage)
            self.owners[name] = (number, self.modules[number].get_submodule(owner), key)

    def begin(self) -> None:
        """Reset the sums before the passes of a step."""
        names = self.buffers if self.moving is None else self.moving
        self._stage_sums = [
            _StageSums(
                {name: self.buffers[name] for name in names if self._is_in_stage(name, number)},
                self.device,
            )
            for number in range(len(self.modules))
        ]
        self._means: dict[str, Tensor] = {}

    def begin_pass(self, number: int) -> None:
        """Install copies before the forward pass of a microbatch through a stage.

        The copies are new, since the backward of another microbatch may still need its own.
        """
        stage = self._stage_sums[number]
        stage.copies = {name: value.clone() for name, value in stage.buffers.items()}
        self._install(stage.copies)

    @torch.no_grad()
    def end_pass(self, num_samples: int, number: int) -> None:
        """Add the results of a forward pass; a microbatch without samples does not count."""
        stage = self._stage_sums[number]
        if stage.copies:
            values = {name: self._current(name) for name in stage.copies}
            stage.add(values, num_samples > 0, tracks_changes=self.moving is None)

    @torch.no_grad()
    def reduce(self) -> None:
        """Sum over all ranks after the passes of a step: one collective, none if no buffer changes.

        In the first step another collective finds out which buffers change.
        """
        self._install(self.buffers)  # not earlier: a backward that recomputes updates buffers, too
        if self.moving is None:
            changed = {name for stage in self._stage_sums for name in stage.changed}
            flags = torch.tensor([float(name in changed) for name in self.sizes])
            flags = flags.to(self.device)
            wait_for(self.ranks.allreduce([flags]))
            counts = zip(self.sizes, flags.tolist(), strict=True)
            self.moving = [name for name, count in counts if count]
        if not self.moving:
            return
        local_sums = {
            name: sums for stage in self._stage_sums for name, sums in stage.named_sums().items()
        }
        widths = [1 + self.sizes[name] for name in self.moving]
        parts = zip(self.moving, widths, strict=True)
        flat = torch.cat(
            [local_sums[n] if n in local_sums else self._zeros(width) for n, width in parts]
        )
        wait_for(self.ranks.allreduce([flat]))
        self._means = {
            name: sums[1:].view_as(self.buffers[name]) / sums[0]
            for name, sums in zip(self.moving, flat.split(widths), strict=True)
            if name in self.buffers
        }

    @torch.no_grad()
    def apply(self) -> None:
        """Set the buffers to the mean of the microbatches' results."""
        for name, mean in self._means.items():
            buffer = self.buffers[name]
            buffer.copy_(mean if buffer.is_floating_point() else mean.round())
        self._means = {}

    def _install(self, buffers: Mapping[str, Tensor]) -> None:
        for name, value in buffers.items():
            _, owner, key = self.owners[name]
            setattr(owner, key, value)

    def _current(self, name: str) -> Any:
        _, owner, key = self.owners[name]
        return getattr(owner, key)

    def _is_in_stage(self, name: str, number: int) -> bool:
        return name in self.owners and self.owners[name][0] == number

    def _zeros(self, width: int) -> Tensor:
        return torch.zeros(width, dtype=torch.float64, device=self.device)


class _StageSums:
    """The sums of one stage's buffers over the passes of a step, in float64."""

    def __init__(self, buffers: dict[str, Tensor], device: torch.device) -> None:
        self.buffers = buffers
        self.copies: dict[str, Tensor] = {}
        self.changed: set[str] = set()
        size = sum(value.numel() for value in buffers.values())
        self.sums = torch.zeros(size, dtype=torch.float64, device=device)
        self.num_passes = torch.zeros(1, dtype=torch.float64, device=device)

    def add(self, values: Mapping[str, Tensor], counts: bool, tracks_changes: bool) -> None:
        """Add the buffers after one pass, if it counts; optionally note which ones it changed."""
        if counts:
            self.sums += torch.cat([value.flatten().double() for value in values.values()])
            self.num_passes += 1
        for name, value in values.items() if tracks_changes else ():
            # Compare values: BatchNorm bypasses autograd's version counter.
            if value is not self.copies[name] or not torch.equal(value, self.buffers[name]):
                self.changed.add(name)

    def named_sums(self) -> dict[str, Tensor]:
        """For each buffer the number of passes and the sum, concatenated."""
        pieces = self.sums.split([value.numel() for value in self.buffers.values()])
        return {
            name: torch.cat([self.num_passes, piece])
            for name, piece in zip(self.buffers, pieces, strict=True)
        }
