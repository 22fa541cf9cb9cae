"""The logical tensors of a run's state: their names, shapes and values at step 0."""

from __future__ import annotations

import re
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from elastic.regions import Region
from elastic.specs import Kind, TensorSpec
from pipelines.settings import TrainSettings
from pipelines.training.optimizer import state_template
from pipelines.training.seeds import keyed_generator
from pipelines.training.workload import Workload

LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
OPTIMIZER = "optimizer."


def optimizer_name(parameter: str, key: str) -> str:
    """The logical name of what the optimizer keeps for a parameter."""
    return f"{OPTIMIZER}{parameter}.{key}"


def stored_dtype(settings: TrainSettings) -> torch.dtype:
    """What parameters are kept in; with mixed precision they stay float32."""
    return torch.float64 if settings.dtype == "float64" else torch.float32


def build_on_meta(workload: Workload, settings: TrainSettings) -> nn.Module:
    """The workload's module with shapes and no values."""
    with torch.device("meta"):
        return workload.module().to(stored_dtype(settings))


def state_specs(workload: Workload, settings: TrainSettings) -> tuple[TensorSpec, ...]:
    """Parameters, then buffers that are state, then the optimizer's, each in the module's order.

    What has a parameter's shape is sharded as the parameter is: dim 0 over `fsdp`.
    """
    module = build_on_meta(workload, settings)
    num_layers = len(workload.blocks(module))
    specs = []
    parameters = dict(module.named_parameters())
    for name, parameter in parameters.items():
        specs.append(_spec(name, parameter, num_layers, "parameter", fsdp_dim=0))
    for name, buffer in buffers(module):
        specs.append(_spec(name, buffer, num_layers, "buffer", fsdp_dim=None))
    template = state_template(settings.optimizer, stored_dtype(settings))
    for name, parameter in parameters.items():
        for key, kept in template.items():
            like = parameter.to(kept.dtype) if kept.ndim else kept
            fsdp_dim = 0 if kept.ndim else None
            full_name = optimizer_name(name, key)
            specs.append(_spec(full_name, like, num_layers, "optimizer", fsdp_dim))
    return tuple(specs)


def buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The buffers that belong to the state: those that `state_dict` has."""
    parameters = dict(module.named_parameters())
    kept = module.state_dict(keep_vars=True)
    return ((name, value) for name, value in kept.items() if name not in parameters)


def initial_value(
    workload: Workload, settings: TrainSettings, spec: TensorSpec, region: Region
) -> Tensor:
    """A region of a tensor at step 0, on the host: a function of (seed, name) and nothing else.

    The whole tensor is drawn and the region taken, so that every sharding gives the same. What
    an optimizer keeps begins at 0.
    """
    dtype = getattr(torch, spec.dtype)
    if spec.name.startswith(OPTIMIZER):
        return torch.zeros(region.shape, dtype=dtype)
    whole = torch.empty(spec.shape, dtype=torch.float32 if dtype.is_floating_point else dtype)
    workload.fill(spec.name, whole, keyed_generator("initial", settings.seed, spec.name))
    slices = tuple(
        slice(first, first + length)
        for first, length in zip(region.offsets, region.shape, strict=True)
    )
    return whole[slices].to(dtype, copy=True).contiguous()


def _spec(
    name: str, value: Tensor, num_layers: int, kind: Kind, fsdp_dim: int | None
) -> TensorSpec:
    layer = LAYER.search(name)
    return TensorSpec(
        name,
        tuple(value.shape),
        str(value.dtype).removeprefix("torch."),
        layer=int(layer[1]) if layer else None,
        fsdp_dim=fsdp_dim,
        kind=kind,
        num_layers=num_layers if layer else 0,
    )
