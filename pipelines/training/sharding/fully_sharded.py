"""ZeRO stage 3 by torch's FSDP2."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from actors.distributed.torch_private import sum_unsharded_gradients
from actors.runtime.program import Groups, Interrupt
from pipelines.errors import UserError
from pipelines.settings import TrainSettings
from pipelines.training.models.expert_parallel import named_experts
from pipelines.training.models.joined_model import name_of_shared, roots_of
from pipelines.training.sharding.sharded import (
    as_distributed,
    assign,
    count_copies,
    local_tensor,
    names_without_dims,
    storage_bytes,
)
from pipelines.training.workload.workload import Workload


class FullySharded:
    """Modules whose parameters FSDP gathers block by block; see `Sharded`.

    It leaves out parameters without dims, which FSDP refuses; see `ShardedBesideScalars`.

    Each block, and the rest of the module, is sharded over `fsdp` with replicas over `dp` and `cp`
    (Zhao et al., PyTorch FSDP, 2023). The optimizer's step runs no collective. Gradients are
    summed, never averaged: apply divides by the number of tokens of the global batch.
    """

    elsewhere: Mapping[str, tuple[int, ...]] = MappingProxyType({})

    def __init__(
        self,
        modules: Sequence[nn.Module],
        workload: Workload,
        groups: Groups,
        settings: TrainSettings,
    ) -> None:
        """Take modules on the meta device: shapes without values."""
        self.device = groups.device
        self.offload = settings.offload
        self.reshards = _reshards_after_forward(groups, settings)
        self.reduces_each = settings.sync_each_microbatch and groups.mesh["fsdp"].size() > 1
        self.modules = modules
        self.without_dims = names_without_dims(modules)
        self.roots = [
            root for module in modules for root in self._shard(module, workload, groups, settings)
        ]
        self._read()

    def shards(self) -> dict[str, Tensor]:
        return {name: local_tensor(value) for name, value in self.parameters.items()}

    def num_copies(self) -> dict[str, int]:
        return {name: count_copies(value) for name, value in self.parameters.items()}

    def adopt(self, shards: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> None:
        """Make these the state without copies, with two exceptions.

        FSDP pads parameters that do not divide evenly. Shards that are views of full tensors, as
        those of stages 1 and 2, are copied, because stage 3 does not need the full tensors.
        """
        parts = {
            name: as_distributed(_compact(shard), self.parameters[name])
            for name, shard in shards.items()
        }
        if self.offload:
            parts = {name: part.cpu() for name, part in parts.items()}
        assign(self.modules, parts | dict(buffers), self.without_dims)
        self._read()

    def gather(self, interrupt: Interrupt) -> None:
        """Nothing to do: FSDP gathers each block in its forward."""

    def accumulate(self, last: bool) -> None:
        """Configure the next backward: reduce-scatter over `fsdp`, and all-reduce over the replicas
        only if it is the last. Without `sync_each_microbatch` both run only in the last.

        Without resharding after forward, gathered parameters stay until the last backward.
        """
        for module in self.roots:
            module.set_requires_gradient_sync(last or self.reduces_each)
            module.set_requires_all_reduce(last)
            module.set_is_last_backward(last)
            module.set_reshard_after_backward(last or self.reshards)

    @torch.no_grad()
    def sum_gradients(self, number: int) -> None:
        for part in self.modules[number].modules():
            if isinstance(part, FSDPModule):
                sum_unsharded_gradients(part)

    def reduce(self, interrupt: Interrupt) -> None:
        """Nothing to do: FSDP reduces in the last backward."""

    @torch.no_grad()
    def gradients(self) -> dict[str, Tensor]:
        return {
            name: local_tensor(parameter.grad)
            for name, parameter in self.parameters.items()
            if parameter.grad is not None
        }

    def drop_gradients(self, chosen: Callable[[str], bool] | None = None) -> None:
        for name, parameter in self.parameters.items():
            if chosen is None or chosen(name):
                parameter.grad = None

    def after_step(self) -> None:
        """Nothing to do: FSDP gathers again."""

    def release(self) -> None:
        for module in self._parts():
            module.reshard()

    def resident_tensors(self) -> Iterable[Tensor]:
        return self.shards().values()

    def gradient_bytes(self) -> int:
        return storage_bytes(self.resident_tensors(), self.device)

    def _shard(
        self, module: nn.Module, workload: Workload, groups: Groups, settings: TrainSettings
    ) -> list[FSDPModule]:
        if (shared := name_of_shared(module)) is not None:
            raise UserError(
                f"several models have the parameter {shared}, which fsdp with zero=3 cannot shard: "
                "use --layout dp, or zero=2, as in fsdp=2,zero=2"
            )
        sharded = partial(
            fully_shard,
            mp_policy=_precision(settings),
            offload_policy=self._offload_policy(),
            ignored_params={value for value in module.parameters() if not value.ndim},
        )
        inner = partial(sharded, reshard_after_forward=self.reshards)
        mesh, expert_mesh = _data_mesh(groups.mesh), _data_mesh(groups.experts or groups.mesh)
        experts = [part for _, part in named_experts(module, workload.shape())]
        for part in experts:
            _sum_gradients(inner(part, mesh=expert_mesh))
        for block in workload.blocks(module):
            if block not in experts:
                _sum_gradients(inner(block, mesh=mesh))
        return [_sum_gradients(sharded(root, mesh=mesh)) for root in roots_of(module)]

    def _offload_policy(self) -> OffloadPolicy:
        if not self.offload:
            return OffloadPolicy()
        return CPUOffloadPolicy(pin_memory=self.device.type == "cuda")

    def _read(self) -> None:
        """Look the parameters up again: `adopt` replaces some."""
        names = {name for module in self.modules for name, _ in module.named_parameters()}
        names -= self.without_dims
        self.parameters = {
            name: value
            for module in self.modules
            for name, value in module.state_dict(keep_vars=True).items()
            if name in names
        }

    def _parts(self) -> Iterator[FSDPModule]:
        parts = (part for module in self.modules for part in module.modules())
        return (part for part in parts if isinstance(part, FSDPModule))


def _compact(shard: Tensor) -> Tensor:
    """The shard, copied if its storage is larger than the shard."""
    return shard.clone() if shard.untyped_storage().nbytes() > shard.nbytes else shard


def _reshards_after_forward(groups: Groups, settings: TrainSettings) -> bool:
    """Whether a block's gathered parameters are released after its forward.

    In a pipeline they stay: each microbatch would gather them again.
    """
    is_sharded = groups.mesh["fsdp"].size() > 1
    return settings.reshard_after_forward and is_sharded and groups.layout.pp == 1


def _data_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh for FSDP; without replicas only `fsdp`, as an all-reduce of one rank costs time
    too."""
    alone = mesh["replica"].size() == 1
    return mesh["fsdp"] if alone else mesh["replica", "fsdp"]


def _sum_gradients(module: FSDPModule) -> FSDPModule:
    # Both apply to the module's direct parameters only, not to those of its submodules.
    module.set_gradient_divide_factor(1.0)
    module.set_force_sum_reduction_for_comms(True)
    return module


def _precision(settings: TrainSettings) -> MixedPrecisionPolicy:
    if settings.dtype != "bfloat16":
        return MixedPrecisionPolicy()
    # Inputs are not cast: the embedding returns bfloat16, and the rotary angles must stay exact.
    return MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
