"""ZeRO stages 0 to 2: full parameters on each rank, of which it updates its own shard."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any
from weakref import WeakMethod

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.hooks import RemovableHandle

from actors.distributed.torch_private import widen_gradient
from actors.runtime.program import Groups, Interrupt
from elastic.geometry.zero import divides
from pipelines.settings import TrainSettings
from pipelines.training.models.expert_parallel import named_experts
from pipelines.training.sharding.buckets import (
    Bucket,
    BucketParameter,
    Chunks,
    Finish,
    embed_shard,
    share_uncut,
)
from pipelines.training.sharding.sharded import as_distributed, assign, local_tensor, on_host
from pipelines.training.workload.workload import Workload

SMALL_BYTES = 4 << 20
"""Below this size a bucket's collective does not get faster."""


class ZeroSharded:
    """Modules with full parameters; see `pipelines.training.sharding.sharded`.

    - A rank updates only its shard. A step gathers the other shards before its first forward, so
      apply runs no collective over `fsdp`.
    - Gradients are reduced bucket by bucket during backward: at stage 1 in a step's last backward,
      at stage 2 in each, and then only the shard of the sum is kept.
    - Unsharded gradients are summed over the replicas during the last backward, shards after it.
    - In the last backward all ranks start the buckets in the same order, whichever blocks a pass
      skips. At stage 2 every backward must reach all blocks.
    - With bfloat16 or `offload` the shard is a separate tensor; otherwise it is a view of the full
      parameter.
    """

    elsewhere: Mapping[str, tuple[int, ...]] = MappingProxyType({})

    def __init__(
        self,
        modules: Sequence[nn.Module],
        workload: Workload,
        groups: Groups,
        settings: TrainSettings,
        only: Collection[str] | None = None,
    ) -> None:
        """Take modules on the meta device: shapes without values.

        With `only` these parameters of modules that are sharded otherwise: their gradients are
        summed over a step's passes and reduced behind the last, in `reduce`.
        """
        self.modules = modules
        self.only = only
        self.device = groups.device
        is_sharded = groups.layout.fsdp > 1 and only is None
        self.has_stages = groups.layout.pp > 1
        self.divides_gradients = is_sharded and divides(groups.layout.zero, "gradients")
        self.dtype = torch.bfloat16 if settings.dtype == "bfloat16" else None
        self.offload = settings.offload
        self.takes_each_gradient = self.divides_gradients or self.dtype is not None
        """Whether each backward's gradients are taken from `.grad`, so that autograd does not
        accumulate them."""
        self._hooks: list[RemovableHandle] = []
        self.grouping = [
            group
            for module in modules
            for group in self._coalesce(module, _group_parameters(module, workload, groups, only))
        ]
        self._make_buckets({})
        self.is_stale = True
        self.is_last = False
        self._in_flight: Finish | None = None
        self._sums: list[Finish] = []
        """All-reduces of full gradients; they need no extra memory, so all may be in flight."""
        self._num_started = 0
        """The number of buckets of `order` whose reduction has started in this step."""

    def shards(self) -> dict[str, Tensor]:
        return {part.name: part.shard for part in self._parts()}

    def num_copies(self) -> dict[str, int]:
        return {
            part.name: part.num_copies * bucket.num_replicas
            for bucket in self.buckets
            for part in bucket.parts
        }

    @torch.no_grad()
    def adopt(self, shards: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> None:
        """Make these the state; a shard is not copied if it lies at its offset in memory of the
        size of the full parameter."""
        full, separate = {}, {}
        for part in self._parts():
            shard = shards[part.name]
            if self.dtype is None and not self.offload:
                full[part.name] = embed_shard(shard, part.parameter, part.chunks)
                continue
            separate[part.name] = on_host(shard, self.device) if self.offload else shard
            dtype = self.dtype or shard.dtype
            full_tensor = torch.empty(part.full.shape, dtype=dtype, device=self.device)
            full[part.name] = as_distributed(full_tensor, part.parameter)
        assign(self.modules, full | dict(buffers), self._others())
        self._make_buckets(separate)
        for part in self._parts():
            widen_gradient(part.parameter, part.shard.dtype)
        self._hooks = []
        if self.takes_each_gradient:
            self._add_hooks()
        self.is_stale = True

    @torch.no_grad()
    def gather(self, interrupt: Interrupt) -> None:
        """Gather the shards that other ranks have updated into the full parameters."""
        for bucket in self.buckets if self.is_stale else ():
            interrupt()
            self._finish_previous(bucket.gather())
        self._finish_previous(None)
        self.is_stale = False

    def accumulate(self, last: bool) -> None:
        self.is_last = last and self.only is None
        if self.is_last and not self._hooks:
            self._add_hooks()

    @torch.no_grad()
    def sum_gradients(self, number: int) -> None:
        for part in self._parts() if self.takes_each_gradient else ():
            part.take_gradient()

    @torch.no_grad()
    def reduce(self, interrupt: Interrupt) -> None:
        """Reduce the buckets that no hook has started: schedules with a backward of their own may
        not call hooks."""
        for bucket in self.buckets:
            interrupt()
            for part in bucket.parts:
                part.take_gradient()
            if self.divides_gradients and not all(part.is_reduced for part in bucket.parts):
                self._reduce(bucket)
        if not self.divides_gradients:
            self._reduce_in_order(include_unready=True)
        self._finish_previous(None)
        for bucket in self.buckets:
            interrupt()
            self._finish_previous(bucket.reduce_replicas())
        self._finish_previous(None)
        while self._sums:
            interrupt()
            self._sums.pop(0)()
        interrupt()
        share_uncut(self.buckets)()
        self._keep_gradients()
        self._end_last_backward()

    def gradients(self) -> dict[str, Tensor]:
        return {part.name: part.gradient for part in self._parts() if part.gradient is not None}

    def drop_gradients(self, chosen: Callable[[str], bool] | None = None) -> None:
        if chosen is not None:
            for part in self._parts():
                part.gradient = None if chosen(part.name) else part.gradient
            return
        self._in_flight = None
        self._sums.clear()
        self._num_started = 0
        self._end_last_backward()
        for bucket in self.buckets:
            bucket.drop_gradients()

    def after_step(self) -> None:
        self.is_stale = True

    def release(self) -> None:
        """Nothing to do: full parameters stay."""

    def resident_tensors(self) -> Iterable[Tensor]:
        return (tensor for part in self._parts() for tensor in (part.full, part.shard))

    def gradient_bytes(self) -> int:
        if self.offload and self.device.type != "cpu":
            return 0
        return sum(
            part.shard.itemsize * ((width if self.divides_gradients else part.full.numel()) + flag)
            for bucket in self.buckets
            for flag in [self._gradients_share_reduced(bucket)]
            for part, width in zip(bucket.parts, bucket.widths, strict=True)
        )

    def _others(self) -> set[str]:
        """The names of the tensors that are sharded otherwise."""
        if self.only is None:
            return set()
        return {name for module in self.modules for name in module.state_dict()} - set(self.only)

    def _gradients_share_reduced(self, bucket: Bucket) -> bool:
        """Whether gradients are views of the reduced buffer, which also has a flag for each."""
        return not bucket.is_local and (self.divides_gradients or bucket.num_chunks == 1)

    def _add_hooks(self) -> None:
        """Register hooks, only for backwards that need them: a call costs as much as a small
        operation. Without a pipeline, `reduce` starts the last bucket just as early."""
        # A weak reference: the cycle collector does not see a parameter's hooks.
        accumulated: WeakMethod[Callable[[int, int], None]] = WeakMethod(self._accumulated)
        needs_all = self.takes_each_gradient or self.has_stages
        awaited = self.buckets if needs_all else self.order[:-1]
        for bucket_index, bucket in enumerate(self.buckets):
            for index, part in enumerate(bucket.parts if bucket in awaited else ()):
                if part.parameter.requires_grad:
                    hook = partial(_call, accumulated, bucket_index, index)
                    self._hooks.append(part.parameter.register_post_accumulate_grad_hook(hook))

    def _end_last_backward(self) -> None:
        self.is_last = False
        while self._hooks and not self.takes_each_gradient:
            self._hooks.pop().remove()

    def _accumulated(self, bucket_index: int, index: int) -> None:
        """Called by autograd when a parameter's gradient is accumulated; it includes earlier
        passes whose gradients were not taken."""
        bucket = self.buckets[bucket_index]
        part = bucket.parts[index]
        part.take_gradient()
        if self.divides_gradients or self.is_last:
            bucket.num_ready += 1
            if bucket.num_ready < len(bucket.parts):
                return
            if self.divides_gradients:
                self._reduce(bucket)
            else:
                self._reduce_in_order()

    def _reduce_in_order(self, include_unready: bool = False) -> None:
        """Start the reduction of buckets in order, up to the first that is not ready."""
        while self._num_started < len(self.order):
            bucket = self.order[self._num_started]
            if not include_unready and bucket.num_ready < len(bucket.parts):
                return
            self._num_started += 1
            self._reduce(bucket)

    def _keep_gradients(self) -> None:
        """Assign the reduced gradients; the host reads once which parameters have any."""
        summed = [bucket for bucket in self.buckets if bucket.total is not None]
        if not summed:
            return
        counts = torch.cat([bucket.gradient_counts().double() for bucket in summed]).tolist()
        for bucket in summed:
            bucket.keep_gradients(counts[: len(bucket.parts)])
            counts = counts[len(bucket.parts) :]

    def _reduce(self, bucket: Bucket) -> None:
        if bucket.num_chunks == 1:
            self._sums.append(bucket.reduce_full())
        else:
            self._finish_previous(bucket.reduce_shards(keeps_full=not self.divides_gradients))

    def _finish_previous(self, started: Finish | None) -> None:
        """Finish the previous collective; with the one just started, at most two are in flight."""
        previous, self._in_flight = self._in_flight, started
        if previous is not None:
            previous()

    def _make_buckets(self, separate_shards: Mapping[str, Tensor]) -> None:
        named = {n: p for module in self.modules for n, p in module.named_parameters()}
        self.buckets = []
        for names, mesh in self.grouping:
            num_chunks, index = mesh["fsdp"].size(), mesh.get_local_rank("fsdp")
            parts = []
            for name in names:
                chunks = Chunks(local_tensor(named[name]).shape, num_chunks, index)
                parts.append(BucketParameter(name, named[name], chunks, separate_shards.get(name)))
            self.buckets.append(Bucket(parts, mesh))
        position = {name: index for index, name in enumerate(named)}
        trained = [bucket for bucket in self.buckets if bucket.parts[0].parameter.requires_grad]
        self.order = sorted(
            trained, key=lambda bucket: -min(position[part.name] for part in bucket.parts)
        )
        """The order of backward, if modules are constructed in forward order."""

    def _coalesce(
        self, module: nn.Module, groups: Iterable[tuple[list[str], DeviceMesh]]
    ) -> Iterator[tuple[list[str], DeviceMesh]]:
        """Merge small groups with ones before them of the same mesh and dtype.

        Backward reaches the groups in about this order: so the first bucket is reduced early, and
        what remains for the end of backward is small. At stage 2 nothing is merged, so that full
        gradients are released soon.
        """
        position = {name: index for index, (name, _) in enumerate(module.named_parameters())}
        in_backward = sorted(groups, key=lambda group: -min(map(position.__getitem__, group[0])))
        small = 0 if self.divides_gradients else SMALL_BYTES
        newest: dict[tuple[Any, ...], list[str]] = {}
        merged: list[tuple[list[str], DeviceMesh]] = []
        for names, mesh in in_backward:
            first = module.get_parameter(names[0])
            kind = (id(mesh), first.dtype, first.requires_grad)
            target = newest.get(kind)
            if target is None or _num_bytes(module, target) >= small:
                newest[kind] = target = []
                merged.append((target, mesh))
            target += names
        yield from merged

    def _parts(self) -> Iterator[BucketParameter]:
        return (part for bucket in self.buckets for part in bucket.parts)


def _call(
    method: WeakMethod[Callable[[int, int], None]], bucket_index: int, index: int, parameter: Tensor
) -> None:
    accumulated = method()
    assert accumulated is not None, "a backward pass after its modules were dropped"
    accumulated(bucket_index, index)


def _num_bytes(module: nn.Module, names: Iterable[str]) -> int:
    return sum(local_tensor(module.get_parameter(name)).nbytes for name in names)


def _group_parameters(
    module: nn.Module, workload: Workload, groups: Groups, only: Collection[str] | None
) -> Iterator[tuple[list[str], DeviceMesh]]:
    """The groups of parameter names that are gathered and reduced together, with their mesh.

    A group is a block without its experts, the experts of a block, or one module outside blocks.
    """
    named = module.named_parameters()
    names = {parameter: name for name, parameter in named if only is None or name in only}
    experts = [part for _, part in named_experts(module, workload.shape())]
    owners: list[tuple[Iterable[nn.Parameter], DeviceMesh]] = []
    for block in workload.blocks(module):
        inner = [part for part in block.modules() if part in experts]
        owners += [(part.parameters(), groups.experts or groups.mesh) for part in inner]
        owners.append((block.parameters(), groups.mesh))
    owners += [(part.parameters(), groups.experts or groups.mesh) for part in experts]
    owners += [(part.parameters(recurse=False), groups.mesh) for part in module.modules()]
    for parameters, mesh in owners:
        ungrouped = [parameter for parameter in parameters if parameter in names]
        for trained in (True, False):  # frozen parameters have no gradients to reduce
            group = [names.pop(value) for value in ungrouped if value.requires_grad == trained]
            if group:
                yield group, mesh
