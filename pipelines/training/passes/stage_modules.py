"""The modules of a pipeline rank: for each stage, the model without the layers of other stages."""

from __future__ import annotations

from typing import NamedTuple

from torch import nn

from elastic.geometry.layout import Layout
from elastic.geometry.pipeline_stages import deal_layers
from pipelines.settings import TrainSettings
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


def _remove_other_layers(module: nn.Module, shape: ModelShape, kept_layers: range) -> None:
    for number, layer in enumerate(shape.layers):
        for name in layer.modules if number not in kept_layers else ():
            owner, _, child = name.rpartition(".")
            holder = module.get_submodule(owner)
            if isinstance(holder, nn.ModuleDict):
                del holder[child]
            else:
                setattr(holder, child, shape.make_substitute(holder.get_submodule(child)))
