"""Tensor parallelism without sequence parallelism, for third-party modules.

Each rank has the hidden states of all tokens (Shoeybi et al., Megatron-LM, 2019). Every parameter
becomes a DTensor, sharded or replicated, as FSDP requires. While a module's forward runs, plain
local tensors replace its parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn import functional

from actors.distributed.flat_collectives import all_gather
from actors.distributed.torch_private import direct_parameters
from elastic.geometry.regions import chunk_interval
from pipelines.training.workload.state import TP_DIMS
from pipelines.training.workload.workload import ModelShape, Style


class TensorRanks(Protocol):
    """The ranks of a `tp` group, as the sharded layers use them."""

    def rank(self) -> int: ...

    def size(self) -> int: ...

    def all_reduce(self, total: Tensor) -> None:
        """Sum a contiguous tensor over the ranks, in place."""

    def all_gather(self, part: Tensor) -> Tensor:
        """The contiguous parts of all ranks, which have one shape, stacked in dim 0."""


class GroupRanks:
    """The ranks of a process group; see `TensorRanks`."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group

    def rank(self) -> int:
        return self._group.rank()

    def size(self) -> int:
        return self._group.size()

    def all_reduce(self, total: Tensor) -> None:
        dist.all_reduce(total, group=self._group)

    def all_gather(self, part: Tensor) -> Tensor:
        parts = part.new_empty((self.size(), *part.shape))
        all_gather(parts.view(-1), part.view(-1), group=self._group)
        return parts


def parallelize_parameters(module: nn.Module, shape: ModelShape, mesh: DeviceMesh) -> None:
    """Shard the linear layers and embeddings that have a style over `tp`; modules without a style
    are replicated.

    `colwise` and `logits` take full hidden states and return this rank's shard of the last dim;
    `colwise_gathered` returns the shards of all ranks. `rowwise` takes such a shard, or full hidden
    states and uses its shard of them, and returns the full sum. `vocabulary` shards the rows of an
    embedding. A `partial` module is replicated but sees only this rank's heads: its gradients must
    be summed over `tp`.
    """

    def distribute(parameter: Tensor, dim: int | None) -> Tensor:
        placement = Replicate() if dim is None else Shard(dim)
        return distribute_tensor(parameter, mesh, [placement])

    _shard_modules(module, shape, GroupRanks(mesh.get_group()), distribute)


def cut_parameters(module: nn.Module, shape: ModelShape, ranks: TensorRanks) -> None:
    """The same with plain tensors: a rank's parts of the parameters."""

    def cut(parameter: Tensor, dim: int | None) -> Tensor:
        if dim is None:
            return parameter
        first, size = chunk_interval(parameter.shape[dim], ranks.size(), ranks.rank())
        return parameter.narrow(dim, first, size)

    _shard_modules(module, shape, ranks, cut)


def _shard_modules(
    module: nn.Module,
    shape: ModelShape,
    ranks: TensorRanks,
    shard: Callable[[Tensor, int | None], Tensor],
) -> None:
    """`shard` returns the shard of a parameter in a dim; None: it is replicated."""
    sharded: dict[Tensor, nn.Parameter] = {}
    for name, part in list(module.named_modules()):
        if shape.belongs_to_experts(name):
            continue  # their ranks are those of `ep`
        style = shape.style_of(name)
        own = dict(part.named_parameters(recurse=False))
        for key, parameter in own.items():
            if parameter not in sharded:
                dim = TP_DIMS.get(style) if style else None
                dim = dim if dim is not None and dim < parameter.ndim else None
                value = shard(parameter.detach(), dim)
                sharded[parameter] = nn.Parameter(value, requires_grad=parameter.requires_grad)
            setattr(part, key, sharded[parameter])
        if own:
            part.forward = _forward(style, part, ranks)


def _forward(style: Style | None, part: nn.Module, ranks: TensorRanks) -> Callable[..., Any]:
    forward = part.forward

    def plain(*inputs: Any, **options: Any) -> Any:
        with _local_parameters(part):
            return forward(*inputs, **options)

    def column_parallel(hidden: Tensor) -> Any:
        with _local_parameters(part):
            return forward(_SumGradients.apply(hidden, ranks))

    def gathered_columns(hidden: Tensor) -> Any:
        return _GatherWidth.apply(column_parallel(hidden), part.out_features, ranks)

    def row_parallel(hidden: Tensor) -> Tensor:
        with _local_parameters(part):
            assert isinstance(part, nn.Linear)
            if hidden.shape[-1] == part.in_features:
                hidden = _SplitWidth.apply(hidden, ranks)
            output: Tensor = _AllReduce.apply(functional.linear(hidden, part.weight), ranks)
            return output if part.bias is None else output + part.bias

    def vocab_parallel(tokens: Tensor) -> Tensor:
        with _local_parameters(part):
            assert isinstance(part, nn.Embedding)
            embedded: Tensor = _AllReduce.apply(_embed(tokens, part, ranks), ranks)
            return embedded

    match style:
        case "colwise" | "logits":
            return column_parallel
        case "colwise_gathered":
            return gathered_columns
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


def _embed(tokens: Tensor, part: nn.Embedding, ranks: TensorRanks) -> Tensor:
    """The embeddings of the tokens in this rank's shard of the vocabulary, 0 for other tokens."""
    first, size = chunk_interval(part.num_embeddings, ranks.size(), ranks.rank())
    index, padding = tokens - first, part.padding_idx
    outside = (index < 0) | (index >= size)
    if padding is not None:
        padding = padding - first if first <= padding < first + size else None
    embedded = functional.embedding(index.masked_fill(outside, 0), part.weight, padding)
    return embedded.masked_fill(outside[..., None], 0.0)


def _own_width(hidden: Tensor, ranks: TensorRanks) -> Tensor:
    first, size = chunk_interval(hidden.shape[-1], ranks.size(), ranks.rank())
    return hidden[..., first : first + size].contiguous()


def _gathered_width(part: Tensor, width: int, ranks: TensorRanks) -> Tensor:
    longest = -(-width // ranks.size())
    padded = functional.pad(part, (0, longest - part.shape[-1])).contiguous()
    parts = ranks.all_gather(padded)
    return parts.movedim(0, -2).flatten(-2)[..., :width]


class _SumGradients(torch.autograd.Function):
    """Identity in forward, all-reduce of the gradient in backward."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, ranks: TensorRanks) -> Tensor:
        ctx.ranks = ranks
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        total = gradient.clone(memory_format=torch.contiguous_format)
        ctx.ranks.all_reduce(total)
        return total, None


class _AllReduce(torch.autograd.Function):
    """All-reduce in forward, identity in backward."""

    @staticmethod
    def forward(ctx: Any, summand: Tensor, ranks: TensorRanks) -> Tensor:
        total = summand.clone(memory_format=torch.contiguous_format)
        ranks.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _GatherWidth(torch.autograd.Function):
    """All-gather of the last dim in forward, this rank's shard of the gradient in backward."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, width: int, ranks: TensorRanks) -> Tensor:
        ctx.ranks = ranks
        return _gathered_width(part, width, ranks)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _own_width(gradient, ctx.ranks), None, None


class _SplitWidth(torch.autograd.Function):
    """This rank's shard of the last dim in forward, all-gather of the gradient in backward."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, ranks: TensorRanks) -> Tensor:
        ctx.ranks, ctx.width = ranks, hidden.shape[-1]
        return _own_width(hidden, ranks)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _gathered_width(gradient, ctx.width, ctx.ranks), None
