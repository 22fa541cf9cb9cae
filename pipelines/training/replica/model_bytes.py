"""Model bytes: the memory facts of a workload, from its tensor specs and from memory trials."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from elastic.geometry.tensor_specs import TensorSpec
from elastic.geometry.training_job import MemoryFacts, PassMemory
from pipelines.settings import TrainSettings
from pipelines.training.replica.memory_trial import pass_memory_of
from pipelines.training.workload.parallel_groups import ALONE
from pipelines.training.workload.state import build_on_meta, stored_dtype
from pipelines.training.workload.workload import Workload


def memory_facts(
    workload: Workload,
    settings: TrainSettings,
    specs: Sequence[TensorSpec],
    degrees: Iterable[int] = (1,),
    has_pp: bool = False,
    on_gpu: bool = False,
) -> MemoryFacts:
    """What the memory model knows of a workload on a CPU or a GPU, with a trial for each of some
    degrees of `tp`.

    Without trials, where the module cannot run on tensors without values, activations are not
    known.
    """
    module = build_on_meta(workload, settings)
    blocks = workload.blocks(module)
    block_bytes = [_num_bytes(block.parameters()) for block in blocks]
    trained = [p for p in module.parameters() if p.requires_grad]
    total = _num_bytes(module.parameters())
    is_half = settings.dtype == "bfloat16"
    half = torch.bfloat16.itemsize / stored_dtype(settings).itemsize
    num_layers = len(workload.shape().layers)
    return MemoryFacts(
        copy_bytes=int(total * half) if is_half else 0,
        gradient_bytes=_num_bytes(trained),
        block_bytes=max(block_bytes, default=total),
        root_bytes=total - sum(block_bytes) if blocks else 0,
        layers=_layers(specs, num_layers) if has_pp else (),
        tied=_cut_and_whole(spec for spec in specs if spec.ties_ends),
        passes=_trials(workload, settings, degrees, on_gpu),
        merges=settings.may_merge,
        sums_whole=not settings.sync_each_microbatch and settings.num_microbatches > 1,
        keeps_gathered=not settings.reshard_after_forward,
        offloads=settings.offload,
        schedule=settings.schedule,
        output_bytes=workload.flowing(num_layers, settings.microbatch, ALONE).nbytes
        if has_pp
        else 0,
        num_blocks=len(blocks),
    )


def _trials(
    workload: Workload, settings: TrainSettings, degrees: Iterable[int], on_gpu: bool
) -> tuple[PassMemory, ...]:
    trials = []
    for tp in degrees:
        try:
            trials.append(pass_memory_of(workload, settings, tp, on_gpu))
        except Exception:  # any operation may refuse tensors without values in its own way
            break
    return tuple(trials)


def _layers(specs: Sequence[TensorSpec], num_layers: int) -> tuple[tuple[int, int], ...]:
    """For each layer, the bytes of its parameters that `tp` cuts, and of the others."""
    layers: list[list[TensorSpec]] = [[] for _ in range(num_layers)]
    for spec in specs:
        if spec.layer is not None and spec.ep_dim is None:
            layers[spec.layer].append(spec)
    return tuple(map(_cut_and_whole, layers))


def _cut_and_whole(specs: Iterable[TensorSpec]) -> tuple[int, int]:
    """The bytes of parameters that `tp` cuts, and of the others."""
    sizes = [0, 0]
    for spec in specs:
        if spec.kind == "parameter":
            sizes[spec.tp_dim is None] += spec.num_bytes
    return sizes[0], sizes[1]


def _num_bytes(parameters: Iterable[nn.Parameter]) -> int:
    return sum(parameter.nbytes for parameter in parameters)
