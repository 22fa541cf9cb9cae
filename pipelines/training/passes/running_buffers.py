"""Buffers that forward passes update, such as BatchNorm's: updated once a step, equal on all ranks.

Each microbatch starts from the values before the step, and apply sets the buffers to the mean of
the microbatches' results. For a running average this is the plain update with the mean of the
microbatches' statistics. So nothing changes before the vote is read, and the result does not depend
on the layout.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup, Work

from actors.distributed.stall import wait_for
from actors.distributed.torch_private import direct_buffers


class BufferGroup:
    """Buffers of one dtype, contiguous in memory, so that a pass costs a few operations for any
    number of buffers."""

    def __init__(self, buffers: Mapping[str, Tensor]) -> None:
        self.before = torch.cat([value.detach().flatten() for value in buffers.values()])
        self.updated = torch.empty_like(self.before)
        self.sums = torch.zeros_like(self.before, dtype=torch.float64)
        parts = self.updated.split([value.numel() for value in buffers.values()])
        # `data`: views share a version counter, so a change of one buffer would invalidate what
        # autograd saved of another.
        self.copies = {
            name: part.view_as(value).data
            for (name, value), part in zip(buffers.items(), parts, strict=True)
        }

    def updated_with(self, replaced: Mapping[str, Tensor]) -> Tensor:
        """The values after a pass, if it has replaced some copies with other tensors."""
        if not replaced.keys() & self.copies.keys():
            return self.updated
        values = [replaced.get(name, copy) for name, copy in self.copies.items()]
        return torch.cat([value.detach().flatten().to(self.updated) for value in values])

    def named_sums(self) -> dict[str, Tensor]:
        parts = self.sums.split([copy.numel() for copy in self.copies.values()])
        return dict(zip(self.copies, parts, strict=True))


class RunningBuffers:
    """The updated buffers of one rank's modules.

    A buffer that passes update must change in the first step of a generation, as any running
    average does, unless `may_thaw` and its module is in evaluation mode there.
    """

    def __init__(self, modules: Sequence[nn.Module], ranks: ProcessGroup) -> None:
        """Take the modules, and the ranks over which the results of the passes are summed."""
        self.modules = modules
        self.ranks = ranks
        self.buffers: dict[str, Tensor] = {}
        self.moving: list[str] | None = None
        """The names of the buffers that passes update; None before the first step shows it."""
        self.may_thaw = False
        """Whether modules may leave their evaluation mode between two steps."""
        self._parts: dict[str, nn.Module] = {}
        self._owners: dict[str, tuple[dict[str, Tensor | None], str]] = {}

    def keep(self, buffers: Mapping[str, Tensor]) -> None:
        """Take the modules' buffers that are part of the state; only `apply` changes them."""
        self.buffers = dict(buffers)
        self.moving = None if buffers else []
        for name in buffers:
            owner, _, key = name.rpartition(".")
            holders = (module for module in self.modules if _has(module, owner, key))
            self._parts[name] = part = next(holders).get_submodule(owner)
            self._owners[name] = (direct_buffers(part), key)

    def installed(self) -> dict[str, Tensor]:
        """What the modules have now in the place of the buffers."""
        values = {name: holder[key] for name, (holder, key) in self._owners.items()}
        return {name: value for name, value in values.items() if value is not None}

    @torch.no_grad()
    def begin(self) -> None:
        """Install copies before the passes of a step, for the passes to update."""
        names = list(self.buffers) if self.moving is None else self.moving
        by_dtype: dict[torch.dtype, dict[str, Tensor]] = {}
        for name in names:
            by_dtype.setdefault(self.buffers[name].dtype, {})[name] = self.buffers[name]
        self._groups = [BufferGroup(buffers) for buffers in by_dtype.values()]
        self._copies = {name: copy for group in self._groups for name, copy in group.copies.items()}
        self._num_passes = torch.zeros((), dtype=torch.float64)
        self._changed = dict.fromkeys(names, False)
        self._has_replaced = False
        self._pending: tuple[Work, list[Tensor]] | None = None
        self._means: dict[str, Tensor] = {}
        self._install(self._copies)

    def begin_pass(self) -> None:
        """Reset the copies before the forward pass of a microbatch."""
        for group in self._groups:
            group.updated.copy_(group.before)
        if self._has_replaced:
            self._install(self._copies)

    def end_pass(self, num_tokens: Tensor, is_last: bool, num_microbatches: int = 1) -> None:
        """Add the results of a forward pass, which counts as its microbatches; one without tokens
        does not count.

        The all-reduce of the sums overlaps with the step's last backward.
        """
        if not self._copies:
            return
        replaced = self._replaced()
        self._has_replaced = self._has_replaced or bool(replaced)
        counts = num_tokens > 0
        if not num_tokens.is_cpu:
            self._num_passes = self._num_passes.to(counts.device) + num_microbatches * counts
            for group in self._groups:
                updated = torch.where(counts, group.updated_with(replaced), 0)
                group.sums.add_(updated, alpha=num_microbatches)
        elif counts:
            self._num_passes += num_microbatches
            for group in self._groups:
                group.sums.add_(group.updated_with(replaced), alpha=num_microbatches)
        for name, copy in self._copies.items() if self.moving is None else ():
            # Compare values: BatchNorm bypasses autograd's version counter.
            value = replaced.get(name, copy)
            self._changed[name] = self._changed[name] or not torch.equal(value, self.buffers[name])
        if is_last and self.moving:
            self._begin_sum(self.moving)

    @torch.no_grad()
    def reduce(self) -> None:
        """Sum over all ranks after the passes of a step: one collective, none if no buffer changes.

        In the first step another collective finds out which buffers change.
        """
        self._install(self.buffers)  # not earlier: a backward that recomputes updates buffers, too
        if self.moving is None:
            moving = [c or self._may_change(name) for name, c in self._changed.items()]
            flags = torch.tensor(moving, dtype=torch.float32)
            flags = flags.to(self._num_passes.device)
            wait_for(self.ranks.allreduce([flags]))
            counts = zip(self._changed, flags.tolist(), strict=True)
            self.moving = [name for name, count in counts if count]
            if self.moving:
                self._begin_sum(self.moving)
        if self._pending is None:
            return
        (work, [num_passes, *sums]), self._pending = self._pending, None
        wait_for(work)
        self._means = {
            name: total.view_as(self.buffers[name]) / num_passes.squeeze()
            for name, total in zip(self.moving, sums, strict=True)
        }

    @torch.no_grad()
    def apply(self) -> None:
        """Set the buffers to the mean of the microbatches' results."""
        for name, mean in self._means.items():
            buffer = self.buffers[name]
            buffer.copy_(mean if buffer.is_floating_point() else mean.round())
        self._means = {}

    def _may_change(self, name: str) -> bool:
        return self.may_thaw and not self._parts[name].training

    def _begin_sum(self, names: Sequence[str]) -> None:
        named_sums = {
            name: sums for group in self._groups for name, sums in group.named_sums().items()
        }
        parts = [self._num_passes.view(1), *(named_sums[name] for name in names)]
        flat = torch.cat(parts)
        work = self.ranks.allreduce([flat])
        self._pending = work, list(flat.split([part.numel() for part in parts]))

    def _install(self, buffers: Mapping[str, Tensor]) -> None:
        for name, value in buffers.items():
            holder, key = self._owners[name]
            holder[key] = value

    def _replaced(self) -> dict[str, Tensor]:
        """The tensors with which a forward pass replaced copies; the copies stay unchanged for its
        backward."""
        replaced = {}
        for name, copy in self._copies.items():
            holder, key = self._owners[name]
            value = holder[key]
            if value is not copy:
                assert value is not None, f"buffer {name}: the forward pass has removed it"
                replaced[name] = value
        return replaced


def _has(module: nn.Module, owner: str, key: str) -> bool:
    try:
        return hasattr(module.get_submodule(owner), key)
    except AttributeError:
        return False
