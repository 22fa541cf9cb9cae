"""The modules of a pipeline rank: for each stage, the model without the layers of other stages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torch import nn

from elastic.geometry.layout import Layout
from elastic.geometry.pipeline_stages import deal_layers
from pipelines.settings import TrainSettings
from pipelines.training.workload.layer_tensors import (
    layer_holding,
    layers_by_module,
    names_of_parameters,
)
from pipelines.training.workload.parallel_groups import ParallelGroups
from pipelines.training.workload.state import build_on_meta
from pipelines.training.workload.workload import ModelShape, Workload


class Stage(NamedTuple):
    """One pipeline stage: its index, its layers, and its part of the model."""

    number: int
    layers: range
    module: nn.Module


def build_stages(
    workload: Workload,
    settings: TrainSettings,
    layout: Layout,
    pp_rank: int,
    parallel: ParallelGroups,
) -> list[Stage]:
    """Build the stages of a pipeline rank on the meta device; without a pipeline there is one.

    Each is built as the full model without the layers of other stages, so that names do not change.
    A parameter that it shares with a layer of another stage keeps the name that it has there.
    """
    shape = workload.shape()
    dealt = deal_layers(tuple(layer.cost for layer in shape.layers), layout.pp * layout.vp)
    stages = []
    for number in range(pp_rank, len(dealt), layout.pp):
        module = build_on_meta(workload, settings, parallel)
        _remove_other_layers(module, shape, dealt[number])
        if len(dealt) > 1:
            shape.make_stage(module, dealt[number])
        stages.append(Stage(number, dealt[number], module))
    return stages


class SharedParameters(nn.Module):
    """Takes the place of a module of another stage, and has the parameters that it shares with
    this stage. No pass calls it."""

    def __init__(self, shared: Mapping[str, nn.Parameter]) -> None:
        """`shared` are the parameters by their names in that module."""
        super().__init__()
        for name, parameter in shared.items():
            *owners, key = name.split(".")
            part: nn.Module = self
            for owner in owners:
                if owner not in dict(part.named_children()):
                    part.add_module(owner, nn.Module())
                part = part.get_submodule(owner)
            part.register_parameter(key, parameter)


def _remove_other_layers(module: nn.Module, shape: ModelShape, kept_layers: range) -> None:
    layer_of = layers_by_module(shape.layers)

    def is_kept(name: str) -> bool:
        return layer_holding(layer_of, name) in (None, *kept_layers)

    shared = {
        first: parameter
        for parameter, (first, *others) in names_of_parameters(module).items()
        if not is_kept(first) and any(map(is_kept, others))
    }
    for number, layer in enumerate(shape.layers):
        for name in layer.modules if number not in kept_layers else ():
            removed = f"{name}."
            own = {n.removeprefix(removed): p for n, p in shared.items() if n.startswith(removed)}
            _remove(module, name, SharedParameters(own) if own else None, shape)


def _remove(
    module: nn.Module, name: str, substitute: SharedParameters | None, shape: ModelShape
) -> None:
    owner, _, child = name.rpartition(".")
    holder = module.get_submodule(owner)
    if substitute is not None:
        setattr(holder, child, substitute)
    elif isinstance(holder, nn.ModuleDict):
        del holder[child]
    else:
        setattr(holder, child, shape.make_substitute(holder.get_submodule(child)))
