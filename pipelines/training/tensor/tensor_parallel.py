"""Tensor and sequence parallelism: the modules that `tp` cuts, and a loss over parts of logits.

Parameters are DTensors, as FSDP wants them; what flows between them are plain local tensors.
torch's own styles make a DTensor of each input and output, which takes longer on the host than the
work of a small layer, and reduce the gradient of an input once for each of the modules that share
it.
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
from pipelines.training.workload.spread import Spread
from pipelines.training.workload.workload import ModelShape, Style

CUTS: dict[Style, Placement] = {
    "colwise": Shard(0),
    "logits": Shard(0),
    "vocabulary": Shard(0),
    "rowwise": Shard(1),
    "sequence": Replicate(),
}
"""How the weight of a module of each style lies on the ranks."""


def cut_modules(module: nn.Module, shape: ModelShape, mesh: DeviceMesh, length: int) -> None:
    """Cut the modules that have a style over `tp` (Shoeybi et al., Megatron-LM, 2019; norms over
    the sequence: Korthikanti et al., 2022), so that hidden states between them are spread over
    the sequence, of which this data rank has `length` tokens.

    Every module takes and gives plain local tensors.
    """
    parts = SequenceShards(mesh.get_group(), length)
    for name, part in list(module.named_modules()):
        style = shape.style_of(name)
        if style == "replicated":
            distribute_module(part, mesh)
        elif style == "gather":
            part.register_forward_pre_hook(partial(_gathered, parts))
        elif style is not None:
            weight = distribute_tensor(part.weight, mesh, [CUTS[style]])
            part.weight = nn.Parameter(weight, requires_grad=part.weight.requires_grad)
            part.forward = _forward(style, part, parts)


def whole_vocabulary(logits: Tensor, mesh: DeviceMesh, vocab_size: int) -> DTensor:
    """Logits (tokens, this rank's part of the vocabulary) as a part of the whole, for a loss under
    `torch.distributed.tensor.parallel.loss_parallel`."""
    shape = torch.Size((logits.shape[0], vocab_size))
    return DTensor.from_local(
        logits, mesh, [Shard(1)], run_check=False, shape=shape, stride=(vocab_size, 1)
    )


def summed_over_sequence(parameters: Iterable[str], shape: ModelShape, spread: Spread) -> list[str]:
    """Of these parameters those of the norms: a rank of `tp` has the gradients of its own tokens,
    or heads, alone."""
    if spread.tp is None:
        return []
    in_parts = ("sequence", "partial")
    return [one for one in parameters if shape.style_of(one.rpartition(".")[0]) in in_parts]


@torch.no_grad()
def sum_over_sequence(of_norms: Sequence[Tensor], mesh: DeviceMesh) -> None:
    """Sum these gradients over `tp`: one collective a step, over what is left after the reduction
    over the data ranks."""
    total = torch.cat([gradient.flatten() for gradient in of_norms]).to(mesh.device_type)
    dist.all_reduce(total, group=mesh.get_group())
    for gradient, summed in zip(
        of_norms, total.split([gradient.numel() for gradient in of_norms]), strict=True
    ):
        gradient.copy_(summed.view_as(gradient))


def _gathered(
    parts: SequenceShards, module: nn.Module, inputs: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    return parts.gather(inputs[0]), *inputs[1:]


def _forward(style: Style, part: nn.Module, parts: SequenceShards) -> Callable[[Tensor], Tensor]:
    """What replaces a module's forward; its weight is looked up anew each time, for FSDP puts
    another there."""
    match style:
        case "colwise":
            return lambda hidden: functional.linear(hidden, part.weight.to_local())
        case "rowwise":
            return lambda hidden: parts.scatter(functional.linear(hidden, part.weight.to_local()))
        case "logits":
            return lambda hidden: functional.linear(parts.gather(hidden), part.weight.to_local())
        case "sequence":
            return lambda hidden: functional.rms_norm(
                hidden, part.normalized_shape, part.weight.to_local(), part.eps
            )
        case "vocabulary":
            return lambda tokens: parts.scatter(_embed(tokens, part, parts))
        case _:
            raise ValueError(f"{style}: no style of a module that tp cuts")


def _embed(tokens: Tensor, part: nn.Embedding, parts: SequenceShards) -> Tensor:
    """The embeddings of the tokens that lie in this rank's part of the vocabulary, 0 of others."""
    ranks = parts.group
    first, size = chunk_interval(part.num_embeddings, ranks.size(), ranks.rank())
    index, weight = tokens - first, part.weight.to_local()
    outside = (index < 0) | (index >= size)
    embedded = functional.embedding(index.masked_fill(outside, 0), weight)
    return embedded.masked_fill(outside[..., None], 0.0)
