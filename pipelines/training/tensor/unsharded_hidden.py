"""Tensor parallelism without sequence parallelism, for third-party modules.

Each rank has the hidden states of all tokens (Shoeybi et al., Megatron-LM, 2019). Every parameter
becomes a DTensor, sharded or replicated, as FSDP requires. While a module's forward runs, plain
local tensors replace its parameters.
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

from actors.distributed.torch_private import direct_parameters
from elastic.geometry.regions import chunk_interval
from pipelines.training.workload.state import TP_DIMS
from pipelines.training.workload.workload import ModelShape, Style


def parallelize_parameters(module: nn.Module, shape: ModelShape, mesh: DeviceMesh) -> None:
    """Shard the linear layers and embeddings that have a style over `tp`; modules without a style
    are replicated.

    `colwise` and `logits` take full hidden states and return this rank's shard of the last dim.
    `rowwise` takes such a shard and returns the full sum. `vocabulary` shards the rows of an
    embedding. A `partial` module is replicated but sees only this rank's heads: its gradients must
    be summed over `tp`.
    """
    distributed: dict[Tensor, nn.Parameter] = {}
    for name, part in list(module.named_modules()):
        style = shape.style_of(name)
        own = dict(part.named_parameters(recurse=False))
        for key, parameter in own.items():
            if parameter not in distributed:
                distributed[parameter] = _distribute(parameter, style, mesh)
            setattr(part, key, distributed[parameter])
        if own:
            part.forward = _forward(style, part, mesh.get_group())


def _distribute(parameter: nn.Parameter, style: Style | None, mesh: DeviceMesh) -> nn.Parameter:
    dim = TP_DIMS.get(style) if style else None
    placement = Shard(dim) if dim is not None and dim < parameter.ndim else Replicate()
    distributed = distribute_tensor(parameter.detach(), mesh, [placement])
    return nn.Parameter(distributed, requires_grad=parameter.requires_grad)


def _forward(style: Style | None, part: nn.Module, group: ProcessGroup) -> Callable[..., Any]:
    forward = part.forward

    def plain(*inputs: Any, **options: Any) -> Any:
        with _local_parameters(part):
            return forward(*inputs, **options)

    def column_parallel(hidden: Tensor) -> Any:
        with _local_parameters(part):
            return forward(_SumGradients.apply(hidden, group))

    def row_parallel(hidden: Tensor) -> Tensor:
        with _local_parameters(part):
            assert isinstance(part, nn.Linear)
            output: Tensor = _AllReduce.apply(functional.linear(hidden, part.weight), group)
            return output if part.bias is None else output + part.bias

    def vocab_parallel(tokens: Tensor) -> Tensor:
        with _local_parameters(part):
            assert isinstance(part, nn.Embedding)
            embedded: Tensor = _AllReduce.apply(_embed(tokens, part, group), group)
            return embedded

    match style:
        case "colwise" | "logits":
            return column_parallel
        case "rowwise":
            return row_parallel
        case "vocabulary":
            return vocab_parallel
        case _:
            return plain


@contextmanager
def _local_parameters(part: nn.Module) -> Iterator[None]:
    """Replace a module's direct parameters with their local shards."""
    own = direct_parameters(part)
    held = {key: value for key, value in own.items() if isinstance(value, DTensor)}
    own.update({key: value.to_local() for key, value in held.items()})
    try:
        yield
    finally:
        own.update(held)


def _embed(tokens: Tensor, part: nn.Embedding, group: ProcessGroup) -> Tensor:
    """The embeddings of the tokens in this rank's shard of the vocabulary, 0 for other tokens."""
    first, size = chunk_interval(part.num_embeddings, group.size(), group.rank())
    index, padding = tokens - first, part.padding_idx
    outside = (index < 0) | (index >= size)
    if padding is not None:
        padding = padding - first if first <= padding < first + size else None
    embedded = functional.embedding(index.masked_fill(outside, 0), part.weight, padding)
    return embedded.masked_fill(outside[..., None], 0.0)


class _SumGradients(torch.autograd.Function):
    """Identity in forward, all-reduce of the gradient in backward."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        total = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None


class _AllReduce(torch.autograd.Function):
    """All-reduce in forward, identity in backward."""

    @staticmethod
    def forward(ctx: Any, summand: Tensor, group: ProcessGroup) -> Tensor:
        total = summand.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None
