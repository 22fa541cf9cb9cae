"""Whole parameters to compute with, of which each rank keeps its shard: ZeRO's stages 1 and 2, and
plain replicas, whose shard is the whole."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any
from weakref import WeakMethod

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.hooks import RemovableHandle

from actors.runtime.program import Groups, Interrupt
from elastic.geometry.zero import divides
from pipelines.settings import TrainSettings
from pipelines.training.models.experts import Experts
from pipelines.training.sharding.buckets import Bucket, BucketParameter, Chunks, Finish, embed_shard
from pipelines.training.sharding.sharded import as_distributed, assign, local_tensor, on_host
from pipelines.training.workload.workload import Workload

SMALL_BYTES = 1 << 20
"""Of a bucket whose collective takes as long as a smaller one's would."""


class ZeroSharded:
    """Modules with whole parameters; see `pipelines.training.sharding.sharded`.

    A rank steps its shard alone, so a step's first forward begins with gathering those of the
    others: `fsdp` is never talked along in apply. Gradients are reduced block by block while the
    backward goes on: at stage 1 in a step's last, at stage 2 in each, and then only the shard
    of the sum is kept. Gradients that are not cut are summed over the replicas amid the last one,
    those of shards after it. In a step's last backward buckets begin in one order on all ranks,
    whichever blocks a pass leaves out; at stage 2 every backward has to reach all of them. Under
    bfloat16, and with `offload`, the shard is a tensor of its own; else it is a part of the whole
    parameter's memory.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        workload: Workload,
        groups: Groups,
        settings: TrainSettings,
    ) -> None:
        """Take modules on the meta device: they have shapes, but no values."""
        self.modules = modules
        self.device = groups.device
        several = groups.layout.fsdp > 1
        self.divides_gradients = several and divides(groups.layout.zero, "gradients")
        self.dtype = torch.bfloat16 if settings.dtype == "bfloat16" else None
        self.offload = settings.offload
        self.takes_each_gradient = self.divides_gradients or self.dtype is not None
        """Whether no backward may leave its gradients to be added to by the next."""
        self._hooks: list[RemovableHandle] = []
        self.grouping = [
            found
            for module in modules
            for found in self._coalesce(module, _group_parameters(module, workload, groups))
        ]
        self._make_buckets({})
        self.is_stale = True
        self.is_last = False
        self._in_flight: Finish | None = None
        self._sums: list[Finish] = []
        """Of whole gradients, which need no memory but their own: all may be under way."""
        self._num_started = 0
        """Of the buckets in their order, in this step."""

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
        """Uncopied if a shard lies where it belongs in memory of the size of its whole."""
        full, own = {}, {}
        for part in self._parts():
            shard = shards[part.name]
            if self.dtype is None and not self.offload:
                full[part.name] = embed_shard(shard, part.parameter, part.chunks)
                continue
            own[part.name] = on_host(shard, self.device) if self.offload else shard
            dtype = self.dtype or shard.dtype
            full_tensor = torch.empty(part.full.shape, dtype=dtype, device=self.device)
            full[part.name] = as_distributed(full_tensor, part.parameter)
        assign(self.modules, full | dict(buffers))
        self._make_buckets(own)
        self._hooks = []
        if self.takes_each_gradient:
            self._add_hooks()
        self.is_stale = True

    @torch.no_grad()
    def gather(self, interrupt: Interrupt) -> None:
        """Bring the shards that others have stepped into the whole parameters."""
        for bucket in self.buckets if self.is_stale else ():
            interrupt()
            self._finish_previous(bucket.gather())
        self._finish_previous(None)
        self.is_stale = False

    def accumulate(self, last: bool) -> None:
        self.is_last = last
        if last and not self._hooks:
            self._add_hooks()

    @torch.no_grad()
    def reduce(self, interrupt: Interrupt) -> None:
        """What no hook has begun: a schedule that has backwards of its own may call none."""
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
        self._keep_gradients()
        self._end_last_backward()

    def gradients(self) -> dict[str, Tensor]:
        return {part.name: part.gradient for part in self._parts() if part.gradient is not None}

    def drop_gradients(self) -> None:
        self._in_flight = None
        self._sums.clear()
        self._num_started = 0
        self._end_last_backward()
        for bucket in self.buckets:
            bucket.drop_gradients()

    def after_step(self) -> None:
        self.is_stale = True

    def release(self) -> None:
        """Whole parameters stay."""

    def resident_tensors(self) -> Iterable[Tensor]:
        return (tensor for part in self._parts() for tensor in (part.full, part.shard))

    def gradient_bytes(self) -> int:
        if self.offload and self.device.type != "cpu":
            return 0
        return sum(
            part.shard.itemsize * ((width if self.divides_gradients else part.full.numel()) + told)
            for bucket in self.buckets
            for told in [self._gradients_share_reduced(bucket)]
            for part, width in zip(bucket.parts, bucket.widths, strict=True)
        )

    def _gradients_share_reduced(self, bucket: Bucket) -> bool:
        """Whether gradients lie in what was reduced, beside a bucket_index each."""
        return not bucket.is_local and (self.divides_gradients or bucket.num_chunks == 1)

    def _add_hooks(self) -> None:
        """Only for backwards of which each gradient matters: each call takes as long as a small
        operation."""
        # Weakly: from a parameter's hook the collector of cycles sees no way back to the parameter.
        accumulated = WeakMethod(self._accumulated)
        for bucket_index, bucket in enumerate(self.buckets):
            for index, part in enumerate(bucket.parts):
                if part.parameter.requires_grad:
                    hook = partial(_call, accumulated, bucket_index, index)
                    self._hooks.append(part.parameter.register_post_accumulate_grad_hook(hook))

    def _end_last_backward(self) -> None:
        self.is_last = False
        while self._hooks and not self.takes_each_gradient:
            self._hooks.pop().remove()

    def _accumulated(self, bucket_index: int, index: int) -> None:
        """Called by autograd when a parameter's gradient of one backward pass is there, summed
        with those of the passes before if nobody has taken them."""
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
        """Each bucket that is ready, up to the first that is not."""
        while self._num_started < len(self.order):
            bucket = self.order[self._num_started]
            if not include_unready and bucket.num_ready < len(bucket.parts):
                return
            self._num_started += 1
            self._reduce(bucket)

    def _keep_gradients(self) -> None:
        """The host reads once which gradients there are."""
        summed = [bucket for bucket in self.buckets if bucket.total is not None]
        if not summed:
            return
        told = torch.cat([bucket.gradient_counts().double() for bucket in summed]).tolist()
        for bucket in summed:
            bucket.keep_gradients(told[: len(bucket.parts)])
            told = told[len(bucket.parts) :]

    def _reduce(self, bucket: Bucket) -> None:
        if bucket.num_chunks == 1:
            self._sums.append(bucket.reduce_full())
        else:
            self._finish_previous(bucket.reduce_shards(keeps_full=not self.divides_gradients))

    def _finish_previous(self, begun: Finish | None) -> None:
        """Finish the collective before the one that has just begun: two are under way at most."""
        previous, self._in_flight = self._in_flight, begun
        if previous is not None:
            previous()

    def _make_buckets(self, own_shards: Mapping[str, Tensor]) -> None:
        named = {n: p for module in self.modules for n, p in module.named_parameters()}
        self.buckets = []
        for names, mesh in self.grouping:
            num_chunks, index = mesh["fsdp"].size(), mesh.get_local_rank("fsdp")
            parts = []
            for name in names:
                chunks = Chunks(local_tensor(named[name]).shape, num_chunks, index)
                parts.append(BucketParameter(name, named[name], chunks, own_shards.get(name)))
            self.buckets.append(Bucket(parts, mesh))
        place = {name: bucket_index for bucket_index, name in enumerate(named)}
        trained = [one for one in self.buckets if one.parts[0].parameter.requires_grad]
        self.order = sorted(
            trained, key=lambda bucket: -min(place[part.name] for part in bucket.parts)
        )
        """As the backward reaches them, where modules are made in the order of the forward."""

    def _coalesce(
        self, module: nn.Module, found: Iterable[tuple[list[str], DeviceMesh]]
    ) -> Iterator[tuple[list[str], DeviceMesh]]:
        """Fewer groups: one that is small takes in what comes next and lies alike, unless
        gradients of the whole are to be let go of soon."""
        small = 0 if self.divides_gradients else SMALL_BYTES
        newest: dict[tuple[Any, ...], list[str]] = {}
        every: list[tuple[list[str], DeviceMesh]] = []
        for names, mesh in found:
            first = module.get_parameter(names[0])
            kind = (id(mesh), first.dtype, first.requires_grad)
            into = newest.get(kind)
            if into is None or _num_bytes(module, into) >= small:
                newest[kind] = into = []
                every.append((into, mesh))
            into += names
        yield from every

    def _parts(self) -> Iterator[BucketParameter]:
        return (part for bucket in self.buckets for part in bucket.parts)


def _call(method: WeakMethod, bucket_index: int, index: int, parameter: Tensor) -> None:
    accumulated = method()
    assert accumulated is not None, "a backward pass after its modules were dropped"
    accumulated(bucket_index, index)


def _num_bytes(module: nn.Module, names: Iterable[str]) -> int:
    return sum(local_tensor(module.get_parameter(name)).nbytes for name in names)


def _group_parameters(
    module: nn.Module, workload: Workload, groups: Groups
) -> Iterator[tuple[list[str], DeviceMesh]]:
    """The names of the parameters that are gathered and reduced together, and their mesh: those
    of a block, but for its experts, and outside of blocks those of one module."""
    names = {parameter: name for name, parameter in module.named_parameters()}
    owners: list[tuple[Iterable[nn.Parameter], DeviceMesh]] = []
    for block in workload.blocks(module):
        experts = [part for part in block.modules() if isinstance(part, Experts)]
        owners += [(part.parameters(), groups.experts or groups.mesh) for part in experts]
        owners.append((block.parameters(), groups.mesh))
    owners += [(part.parameters(recurse=False), groups.mesh) for part in module.modules()]
    for parameters, mesh in owners:
        found = [parameter for parameter in parameters if parameter in names]
        for trained in (True, False):  # those that are frozen have no gradients to reduce
            alike = [names.pop(one) for one in found if one.requires_grad == trained]
            if alike:
                yield alike, mesh
