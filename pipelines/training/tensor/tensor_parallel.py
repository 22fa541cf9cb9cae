"""Tensor and sequence parallelism: the modules that `tp` shards, and a vocabulary-parallel loss.

Parameters are DTensors, as FSDP requires; activations are plain local tensors. torch's own styles
make a DTensor of each input and output, which takes longer on the host than the work of a small
layer. They also reduce the gradient of an input once for each module that shares it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Placement,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.nn import functional

from elastic.geometry.regions import chunk_interval
from pipelines.training.tensor.sequence_shards import SequenceShards
from pipelines.training.workload.parallel_groups import ParallelGroups
from pipelines.training.workload.workload import ModelShape, Style

PLACEMENTS: dict[Style, Placement] = {
    "colwise": Shard(0),
    "logits": Shard(0),
    "vocabulary": Shard(0),
    "rowwise": Shard(1),
    "sequence": Replicate(),
}
"""The placement of the weight of a module, by its style."""


def parallelize_modules(
    module: nn.Module, shape: ModelShape, mesh: DeviceMesh, length: int
) -> None:
    """Shard the modules that have a style over `tp`, with sequence parallelism between them.

    Shoeybi et al., Megatron-LM, 2019; norms over the sequence: Korthikanti et al., 2022. This data
    rank has `length` tokens of each sequence. Every module takes and returns plain local tensors.
    """
    parts = SequenceShards(mesh.get_group(), length)
    for name, part in list(module.named_modules()):
        style = shape.style_of(name)
        if style == "replicated":
            distribute_module(part, mesh)
        elif style == "gather":
            part.register_forward_pre_hook(partial(_gathered, parts))
        elif style is not None:
            whole = part.get_parameter("weight")
            weight = distribute_tensor(whole, mesh, [PLACEMENTS[style]])
            part.weight = nn.Parameter(weight, requires_grad=whole.requires_grad)
            part.forward = _forward(style, part, parts)


def vocab_parallel_logits(logits: Tensor, mesh: DeviceMesh, vocab_size: int) -> DTensor:
    """Logits (tokens, local vocabulary) as a DTensor sharded over the vocabulary, for a loss under
    `torch.distributed.tensor.parallel.loss_parallel`."""
    shape = torch.Size((logits.shape[0], vocab_size))
    return DTensor.from_local(
        logits, mesh, [Shard(1)], run_check=False, shape=shape, stride=(vocab_size, 1)
    )


def partial_gradient_names(
    parameters: Iterable[str], shape: ModelShape, parallel: ParallelGroups
) -> list[str]:
    """The parameters (of norms) whose gradients are partial over `tp`: each rank has only those of
    its own tokens or heads."""
    if parallel.tp is None:
        return []
    partial_styles = ("sequence", "partial")
    return [
        name for name in parameters if shape.style_of(name.rpartition(".")[0]) in partial_styles
    ]


@torch.no_grad()
def reduce_partial_gradients(gradients: Sequence[Tensor], mesh: DeviceMesh) -> None:
    """Sum these gradients over `tp`, after the reduction over the data ranks: one collective a
    step."""
    total = torch.cat([gradient.flatten() for gradient in gradients]).to(mesh.device_type)
    dist.all_reduce(total, group=mesh.get_group())
    sizes = [gradient.numel() for gradient in gradients]
    for gradient, summed in zip(gradients, total.split(sizes), strict=True):
        gradient.copy_(summed.view_as(gradient))


def _gathered(
    parts: SequenceShards, module: nn.Module, inputs: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    return parts.gather(inputs[0]), *inputs[1:]


def _forward(style: Style, part: nn.Module, parts: SequenceShards) -> Callable[[Tensor], Tensor]:
    """The replacement of a module's forward. It looks the weight up at each call, because FSDP
    replaces it."""
    match style:
        case "colwise":
            return lambda hidden: functional.linear(hidden, local_weight(part))
        case "rowwise":
            return lambda hidden: parts.scatter(functional.linear(hidden, local_weight(part)))
        case "logits":
            return lambda hidden: functional.linear(parts.gather(hidden), local_weight(part))
        case "sequence" if isinstance(part, nn.RMSNorm):
            return lambda hidden: functional.rms_norm(
                hidden, part.normalized_shape, local_weight(part), part.eps
            )
        case "vocabulary" if isinstance(part, nn.Embedding):
            return lambda tokens: parts.scatter(_embed(tokens, part, parts))
        case _:
            raise ValueError(f"{style}: not a style of a {type(part).__name__} that tp shards")


def local_weight(part: nn.Module) -> Tensor:
    """This rank's shard of a module's weight; its gradient reaches the weight."""
    weight = part.weight
    assert isinstance(weight, DTensor), "tp has sharded the weight"
    return weight.to_local()


def _embed(tokens: Tensor, part: nn.Embedding, parts: SequenceShards) -> Tensor:
    """The embeddings of the tokens in this rank's shard of the vocabulary, 0 for other tokens."""
    ranks = parts.group
    first, size = chunk_interval(part.num_embeddings, ranks.size(), ranks.rank())
    index, weight = tokens - first, local_weight(part)
    outside = (index < 0) | (index >= size)
    embedded = functional.embedding(index.masked_fill(outside, 0), weight)
    return embedded.masked_fill(outside[..., None], 0.0)
