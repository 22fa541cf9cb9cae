"""A module made parallel over the mesh: cut, sharded, checkpointed, compiled, interruptible."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from actors.program import Groups, Interrupt
from pipelines.settings import TrainSettings
from pipelines.training.experts import Experts
from pipelines.training.spread import Spread
from pipelines.training.tensor_parallel import cut_modules
from pipelines.training.workload import Workload


def parallelise(
    module: nn.Module,
    workload: Workload,
    groups: Groups,
    spread: Spread,
    settings: TrainSettings,
) -> FSDPModule:
    """Cut a stage's module over `tp`, then shard each block and the rest of it over `fsdp`, with
    replicas over `dp` and `cp`.

    Always FSDP (Zhao et al., 2023), also over an axis of size 1: so no collective is ever left to
    the optimizer's step. Gradients are summed, never averaged: apply divides by the number of
    tokens of the whole batch.
    """
    if spread.tp is not None:
        cut_modules(module, workload.shape(), spread.tp, spread.num_held)
    options = {"mp_policy": _precision(settings)}
    inner = options | {"reshard_after_forward": keeps_shards(groups, settings)}
    mesh, expert_mesh = data_mesh(groups.mesh), data_mesh(groups.experts or groups.mesh)
    for block in workload.blocks(module):
        _wrap_forward(block, settings)
        for experts in (part for part in block.modules() if isinstance(part, Experts)):
            _sum_gradients(fully_shard(experts, mesh=expert_mesh, **inner))
        _sum_gradients(fully_shard(block, mesh=mesh, **inner))
    return _sum_gradients(fully_shard(module, mesh=mesh, **options))


def accumulate(module: FSDPModule, last: bool, reshards: bool) -> None:
    """Reduce gradients over the data ranks in the next backward only if it is a step's last.

    Where shards are not let go of in between (with one, what is gathered is a mere copy), they
    are kept until then.
    """
    module.set_requires_gradient_sync(last)
    module.set_is_last_backward(last)
    module.set_reshard_after_backward(last or reshards)


def keeps_shards(groups: Groups, settings: TrainSettings) -> bool:
    """Whether a block's gathered parameters are let go of after its forward.

    In a pipeline they stay: each microbatch would gather them anew.
    """
    return settings.reshard_after_forward and _num_shards(groups) > 1 and groups.layout.pp == 1


class Interruptible:
    """Hooks that let an abort be noticed within one block, in forward and in backward.

    `interrupt` is the callable of the computation under way; it raises if the generation is
    being aborted. The hooks run before a block's own collectives.
    """

    def __init__(self, blocks: Iterable[nn.Module]) -> None:
        self.interrupt: Interrupt = _go_on
        for block in blocks:
            block.register_forward_pre_hook(self._before_forward, prepend=True)
            block.register_forward_hook(self._after_forward, prepend=True)

    def _before_forward(self, block: nn.Module, inputs: Any) -> None:
        self.interrupt()

    def _after_forward(self, block: nn.Module, inputs: Any, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(self._before_backward)

    def _before_backward(self, gradient: Tensor) -> None:
        self.interrupt()


def data_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Without replicas the shards alone: an all-reduce among one takes its time as well."""
    alone = mesh["replica"].size() == 1
    return mesh["fsdp"] if alone else mesh["replica", "fsdp"]


def _num_shards(groups: Groups) -> int:
    return groups.mesh["fsdp"].size()


def _sum_gradients(module: FSDPModule) -> FSDPModule:
    # Each holds for the module's own parameters only, not for those of modules inside it.
    module.set_gradient_divide_factor(1.0)
    module.set_force_sum_reduction_for_comms(True)
    return module


def _go_on() -> None:
    """Nobody has asked to stop."""


def _wrap_forward(block: nn.Module, settings: TrainSettings) -> None:
    # Replacing `forward` keeps the names of the parameters, which wrapping the module would
    # change, and leaves FSDP's hooks outside of what is compiled and recomputed.
    forward: Callable[..., Any] = block.forward
    if settings.compile:
        forward = torch.compile(forward)
    if settings.activation_checkpointing:
        forward = partial(checkpoint, forward, use_reentrant=False)
    block.forward = forward


def _precision(settings: TrainSettings) -> MixedPrecisionPolicy:
    if settings.dtype != "bfloat16":
        return MixedPrecisionPolicy()
    # Without casting of inputs: the embedding already gives bfloat16, and the angles of the
    # rotary embedding must stay exact.
    return MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
