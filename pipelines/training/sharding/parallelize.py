"""Parallelization of modules over the mesh: tp, fsdp, activation checkpointing, compile, hooks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from math import inf
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from actors.runtime.program import Groups, Interrupt
from elastic.geometry.zero import divides
from pipelines.errors import UserError
from pipelines.settings import TrainSettings
from pipelines.training.models.joined_model import prefix_of, roots_of
from pipelines.training.sharding.fully_sharded import FullySharded
from pipelines.training.sharding.owned import OwnedSharded
from pipelines.training.sharding.recomputation import recomputed
from pipelines.training.sharding.scalars_apart import ScalarsApart
from pipelines.training.sharding.sharded import Sharded, bring_constants
from pipelines.training.sharding.zero import ZeroSharded
from pipelines.training.tensor.draw_trial import find_draws, for_trial
from pipelines.training.tensor.sharded_draws import Draws, draw_as_whole
from pipelines.training.tensor.tensor_parallel import parallelize_modules
from pipelines.training.tensor.unsharded_hidden import GroupRanks, parallelize_parameters
from pipelines.training.workload.parallel_groups import ParallelGroups
from pipelines.training.workload.state import build_on_meta, ownerships
from pipelines.training.workload.trees import tensors_in
from pipelines.training.workload.workload import Workload, starred


def parallelize(
    modules: Sequence[nn.Module],
    workload: Workload,
    groups: Groups,
    parallel: ParallelGroups,
    settings: TrainSettings,
) -> Sharded:
    """Shard the modules of a rank's stages over `tp`, then over `fsdp` by the layout's ZeRO stage.

    FSDP is not used if every data rank holds the full parameters: it would only add work to each
    forward and backward.
    """
    for module in modules:
        bring_constants(module, groups.device)
        parallelize_module(module, workload, parallel, settings)
        if parallel.tp is not None and not workload.shape().sequence_parallel:
            _draw_as_whole(module, workload, parallel.tp, settings)
    sharded: Sharded
    if groups.layout.zero == 3 and not _has_full_parameters(groups):
        sharded = fully = FullySharded(modules, workload, groups, settings)
        if scalars := fully.without_dims:
            beside = ZeroSharded(modules, workload, groups, settings, only=scalars)
            sharded = ScalarsApart(fully, beside)
    else:
        sharded = ZeroSharded(modules, workload, groups, settings)
    deals = groups.layout.fsdp > 1 and divides(groups.layout.zero, "optimizer")
    if not deals or not sharded.shards().keys() & set(workload.whole_parameters):
        return sharded
    owners = ownerships(workload, build_on_meta(workload, settings))
    return OwnedSharded(sharded, owners, groups, settings.offload)


def _draw_as_whole(
    module: nn.Module,
    workload: Workload,
    mesh: DeviceMesh,
    settings: TrainSettings,
) -> None:
    """Let the layers of the module draw for whole tensors; without known layers what is called."""
    names = [name for layer in workload.shape().layers for name in layer.modules]
    if not names:
        roots = roots_of(module)
        names = [prefix_of(number, len(roots)).rstrip(".") for number in range(len(roots))]
    parts = dict(module.named_modules(remove_duplicate=False))
    ranks = GroupRanks(mesh.get_group())
    known: dict[tuple[Any, ...], Draws] = {}
    """Layers that are alike draw alike: each trial builds the model twice."""

    def find(name: str, call: Callable[..., Any]) -> Draws:
        key = _structure(name, parts[name])
        if key not in known:
            known[key] = find_once(name, call)
        return known[key]

    def find_once(name: str, call: Callable[..., Any]) -> Draws:
        dtype = getattr(torch, settings.dtype)
        whole, cut = (for_trial(build_on_meta(workload, settings), dtype) for _ in range(2))
        shape = workload.shape()
        draws = find_draws(
            whole, cut, shape, ranks.size(), lambda copy: call(copy.get_submodule(name))
        )
        if any(draws) and settings.compile:
            raise UserError(
                "compile=true: with tp, dropout of sharded activations needs compile=false"
            )
        return draws

    for name in names:
        if name in parts and any(True for _ in parts[name].parameters()):
            draw_as_whole(parts[name], ranks, partial(find, name))


def _structure(name: str, part: nn.Module) -> tuple[Any, ...]:
    """A key that is the same for layers of one class with the same parts and settings."""
    parts = tuple((inner, part_of.extra_repr()) for inner, part_of in part.named_modules())
    return starred(name), type(part), parts


def parallelize_module(
    module: nn.Module, workload: Workload, parallel: ParallelGroups, settings: TrainSettings
) -> None:
    """Shard a module over `tp`, and compile and checkpoint its blocks as the settings say."""
    if parallel.tp is not None:
        shape = workload.shape()
        if shape.sequence_parallel:
            parallelize_modules(module, shape, parallel.tp, parallel.num_held)
        else:
            parallelize_parameters(module, shape, parallel.tp)
    for block in workload.blocks(module):
        _wrap_forward(block, settings)


def _has_full_parameters(groups: Groups) -> bool:
    """Whether none of this rank's parameters is sharded over data ranks."""
    return all(mesh["fsdp"].size() == 1 for mesh in (groups.mesh, groups.experts or groups.mesh))


CHECK_INTERVAL_S = 0.001
"""The minimum time between two backward hooks. A hook costs as much as a small operation, for each
block of each microbatch."""


class InterruptHooks:
    """Hooks that detect an abort within one block, in forward and in backward.

    `interrupt` is the callable of the current computation; it raises if the generation is being
    aborted. The hooks run before a block's own collectives. On the CPU, blocks whose forward passes
    together take less than `CHECK_INTERVAL_S` share one backward hook.
    """

    def __init__(self, blocks: Iterable[nn.Module], device: torch.device) -> None:
        self.interrupt: Interrupt = _never
        self._on_host = device.type == "cpu"
        self._last_hook_s = -inf
        for block in blocks:
            block.register_forward_pre_hook(self._before_forward, prepend=True)
            block.register_forward_hook(self._after_forward, prepend=True)

    def _before_forward(self, block: nn.Module, inputs: Any) -> None:
        self.interrupt()

    def _after_forward(self, block: nn.Module, inputs: Any, output: Any) -> None:
        now = time.perf_counter()
        if self._on_host and now - self._last_hook_s < CHECK_INTERVAL_S:
            return
        for tensor in tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(self._before_backward)
                self._last_hook_s = now

    def _before_backward(self, gradient: Tensor) -> None:
        self.interrupt()


def _never() -> None:
    """The `interrupt` that never raises."""


def _wrap_forward(block: nn.Module, settings: TrainSettings) -> None:
    # Replacing `forward` keeps the parameter names, which wrapping the module would change, and
    # keeps FSDP's hooks outside of the compiled and recomputed code.
    forward: Callable[..., Any] = block.forward
    if settings.compile:
        forward = torch.compile(forward)
    block.forward = recomputed(forward, settings.activation_checkpointing)
