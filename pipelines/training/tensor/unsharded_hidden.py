"""Tensor parallelism in which each rank has the hidden states of all tokens, for modules that
others have written (Shoeybi et al., Megatron-LM, 2019).

Every parameter becomes a DTensor, cut or whole on each rank, as FSDP wants them; a module computes
with plain local tensors, which stand in their place while its forward runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn import functional

from elastic.geometry.regions import chunk_interval
from pipelines.training.workload.state import CUT_DIMS
from pipelines.training.workload.workload import ModelShape, Style


def cut_parameters(module: nn.Module, shape: ModelShape, mesh: DeviceMesh) -> None:
    """Cut the linear layers and embeddings that have a style over `tp`; what has none is whole on
    each rank, which computes the same with it.

    `colwise` and `logits` take whole hidden states and give this rank's part of the last dim,
    `rowwise` takes such a part and gives the whole, `vocabulary` holds some of the rows. A
    `partial` module is whole, but sees this rank's heads alone: its gradients are to be summed.
    """
    cut: dict[Tensor, nn.Parameter] = {}
    for name, part in list(module.named_modules()):
        style = shape.style_of(name)
        own = dict(part.named_parameters(recurse=False))
        for key, parameter in own.items():
            if parameter not in cut:
                cut[parameter] = _cut(parameter, style, mesh)
            setattr(part, key, cut[parameter])
        if own:
            part.forward = _forward(style, part, mesh.get_group())


def _cut(parameter: nn.Parameter, style: Style | None, mesh: DeviceMesh) -> nn.Parameter:
    dim = CUT_DIMS.get(style) if style else None
    placement = Shard(dim) if dim is not None and dim < parameter.ndim else Replicate()
    distributed = distribute_tensor(parameter.detach(), mesh, [placement])
    return nn.Parameter(distributed, requires_grad=parameter.requires_grad)


def _forward(style: Style | None, part: nn.Module, group: ProcessGroup) -> Callable[..., Any]:
    forward = part.forward

    def whole(*inputs: Any, **options: Any) -> Any:
        with _local_parameters(part):
            return forward(*inputs, **options)

    def columns(hidden: Tensor) -> Any:
        with _local_parameters(part):
            return forward(_Shared.apply(hidden, group))

    def rows(hidden: Tensor) -> Tensor:
        with _local_parameters(part):
            output = _Summed.apply(functional.linear(hidden, part.weight), group)
            return output if part.bias is None else output + part.bias

    def embedded(tokens: Tensor) -> Tensor:
        with _local_parameters(part):
            return _Summed.apply(_embed(tokens, part, group), group)

    match style:
        case "colwise" | "logits":
            return columns
        case "rowwise":
            return rows
        case "vocabulary":
            return embedded
        case _:
            return whole


@contextmanager
def _local_parameters(part: nn.Module) -> Iterator[None]:
    """A module whose own parameters are this rank's parts of them."""
    held = {key: value for key, value in part._parameters.items() if isinstance(value, DTensor)}
    part._parameters.update({key: value.to_local() for key, value in held.items()})
    try:
        yield
    finally:
        part._parameters.update(held)


def _embed(tokens: Tensor, part: nn.Embedding, group: ProcessGroup) -> Tensor:
    """The embeddings of the tokens in this rank's part of the vocabulary, 0 of others."""
    first, size = chunk_interval(part.num_embeddings, group.size(), group.rank())
    index, padding = tokens - first, part.padding_idx
    outside = (index < 0) | (index >= size)
    held = padding is not None and first <= padding < first + size
    embedded = functional.embedding(
        index.masked_fill(outside, 0), part.weight, padding - first if held else None
    )
    return embedded.masked_fill(outside[..., None], 0.0)


class _Shared(torch.autograd.Function):
    """Hidden states as they are; the gradients of all ranks are summed."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        total = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None


class _Summed(torch.autograd.Function):
    """The sum over all ranks; each has its whole gradient."""

    @staticmethod
    def forward(ctx: Any, summand: Tensor, group: ProcessGroup) -> Tensor:
        total = summand.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None
