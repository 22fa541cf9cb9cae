"""Random draws for activations that `tp` shards: each rank draws for the whole tensor, and uses its
part.

So dropout is the same under every degree of `tp`. Which draws are for a part of a tensor, a trial
on the meta device finds out, which compares the whole module with the parts of a rank.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from elastic.geometry.regions import chunk_interval
from pipelines.errors import UserError
from pipelines.training.tensor.unsharded_hidden import TensorRanks
from pipelines.training.workload.drawing import (
    ATTENTION,
    FILLS,
    MASKS,
    NEW,
    drawn_shape,
    first_tensor,
    is_in_place,
)
from pipelines.training.workload.trees import mapped

Shape = tuple[int, ...]
LIKE = torch.rand_like, torch.randn_like


class ShardedDraw(NamedTuple):
    """A draw for a part of a tensor: the dim that `tp` shards, and its whole size."""

    dim: int
    size: int


Draws = Sequence[ShardedDraw | None]
"""The draws of a call in order; None: each rank draws for a whole tensor."""


class Unknown(UserError):
    """The reason why it is unknown which draws are for sharded tensors."""


class RefusedDraws(TorchFunctionMode):
    """Raises an error at the first draw."""

    def __init__(self, error: UserError) -> None:
        super().__init__()
        self.error = error

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if drawn_shape(function, args, kwargs or {}) is not None:
            raise self.error
        return function(*args, **(kwargs or {}))


class _Active(threading.local):
    mode: ShardedDraws | None = None


_active = _Active()


class ShardedDraws(TorchFunctionMode):
    """Draws for the whole tensor where a rank has a part of it."""

    def __init__(self, draws: Draws, ranks: TensorRanks, number: int = 0) -> None:
        """`number` is that of the first draw."""
        super().__init__()
        self.draws, self.ranks, self.number = draws, ranks, number
        self._outer: list[ShardedDraws | None] = []

    def __enter__(self) -> ShardedDraws:
        self._outer.append(_active.mode)
        _active.mode = self
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        _active.mode = self._outer.pop()
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        shape = drawn_shape(function, args, kwargs)
        draw = None if shape is None else self._next(shape)
        if shape is None or draw is None:
            return function(*args, **kwargs)
        return _Drawing(function, args, kwargs, shape, draw, self.ranks).result()

    def refuse_fewer(self) -> None:
        """Raise `UserError` unless all draws have been made."""
        if self.number != len(self.draws):
            raise UserError(OTHER_DRAWS)

    def _next(self, shape: Shape) -> ShardedDraw | None:
        if self.number == len(self.draws):
            raise UserError(OTHER_DRAWS)
        draw = self.draws[self.number]
        self.number += 1
        if draw is not None:
            own = chunk_interval(draw.size, self.ranks.size(), self.ranks.rank())[1]
            if draw.dim >= len(shape) or shape[draw.dim] != own:
                raise UserError(OTHER_DRAWS)
        return draw


OTHER_DRAWS = (
    "tp: a pass draws other random numbers than the first one, so that the ranks cannot draw "
    "alike: draw the same in each pass, or use tp=1"
)


class _Drawing:
    """One call that draws for a part of a tensor."""

    def __init__(
        self,
        function: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        shape: Shape,
        draw: ShardedDraw,
        ranks: TensorRanks,
    ) -> None:
        self.function, self.args, self.kwargs = function, args, kwargs
        self.whole_shape = (*shape[: draw.dim], draw.size, *shape[draw.dim + 1 :])
        self.draw, self.ranks = draw, ranks

    def result(self) -> Tensor:
        function = self.function
        if function in MASKS:
            return self._dropped()
        if function in LIKE:
            return self._own(self._call(self._like(self._tensor)))
        if function in FILLS:
            tensor, *others = self.args
            whole = self._like(tensor)
            function(whole, *others, **self.kwargs)
            filled: Tensor = tensor.copy_(self._own(whole))
            return filled
        if function in NEW:
            options = {key: value for key, value in self.kwargs.items() if key != "size"}
            return self._own(function(self.whole_shape, **options))
        if function is ATTENTION and self._tensor.device.type != "cuda":
            return self._attended(*self.args, **self.kwargs)
        where = "on a GPU " if function is ATTENTION else ""
        raise UserError(
            f"tp: {function.__name__} {where}cannot draw for the part of a tensor that a rank has: "
            "use dropout, or set its probability to 0"
        )

    @property
    def _tensor(self) -> Tensor:
        return first_tensor(self.args, self.kwargs)

    def _dropped(self) -> Tensor:
        tensor, in_place = self._tensor, is_in_place(self.args, self.kwargs)
        mask = self._own(self._call(self._like(tensor).fill_(1)))
        return tensor.mul_(mask) if in_place else tensor * mask

    def _call(self, whole: Tensor) -> Tensor:
        """The call for a whole tensor, not in place."""
        tensor = self._tensor
        args = [whole if value is tensor else value for value in self.args[:3]]
        kwargs = {key: whole if value is tensor else value for key, value in self.kwargs.items()}
        kwargs.pop("inplace", None)
        drawn: Tensor = self.function(*args, **kwargs)
        return drawn

    def _like(self, tensor: Tensor) -> Tensor:
        """A whole tensor whose elements are in memory in the same order: draws follow it."""
        order = sorted(range(tensor.dim()), key=lambda dim: -tensor.stride()[dim])
        made = tensor.new_empty([self.whole_shape[dim] for dim in order])
        return made.permute([order.index(dim) for dim in range(tensor.dim())])

    def _own(self, whole: Tensor) -> Tensor:
        first, size = chunk_interval(self.draw.size, self.ranks.size(), self.ranks.rank())
        return whole.narrow(self.draw.dim, first, size)

    def _attended(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Attention over this rank's heads, with the dropout of its weights for all heads."""
        if enable_gqa:
            key, value = (
                heads.repeat_interleave(query.shape[1] // heads.shape[1], 1)
                for heads in (key, value)
            )
        scores = query @ key.mT * (scale or 1 / math.sqrt(query.shape[-1]))
        if is_causal:
            attn_mask = scores.new_ones(scores.shape[-2:], dtype=torch.bool).tril()
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            scores = scores.masked_fill(attn_mask.logical_not(), -math.inf)
        elif attn_mask is not None:
            scores = scores + attn_mask
        is_masked = (scores == -math.inf).all(-1, keepdim=True)
        weights = scores.masked_fill(is_masked, 0).softmax(-1).masked_fill(is_masked, 0)
        whole = weights.new_ones(*self.whole_shape[:-1], weights.shape[-1])
        mask = functional.dropout(whole, dropout_p)
        return weights * self._own(mask) @ value


def draw_as_whole(
    part: nn.Module, ranks: TensorRanks, find: Callable[[Callable[..., Any]], Draws]
) -> None:
    """Let a module draw for whole tensors in training; `find` finds the draws of its first call."""
    forward = part.forward
    known: list[Draws | Unknown] = []

    def run(*args: Any, **kwargs: Any) -> Any:
        if not part.training:
            return forward(*args, **kwargs)
        if not known:
            inputs, named = mapped(lambda tensor: tensor.detach().to("meta"), (args, kwargs))
            try:
                known.append(find(lambda module: module(*inputs, **named)))
            except Unknown as unknown:
                known.append(unknown)
        [draws] = known
        if isinstance(draws, Unknown):
            with RefusedDraws(draws):
                return forward(*args, **kwargs)
        if not any(draws):
            return forward(*args, **kwargs)
        with ShardedDraws(draws, ranks) as mode:
            result = forward(*args, **kwargs)
        mode.refuse_fewer()
        return result

    part.forward = run


def drawing_again(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A forward whose later calls, in backward, draw what the first one draws."""
    mode = _active.mode
    if mode is None:
        return forward
    draws, ranks, number = mode.draws, mode.ranks, mode.number
    has_run: list[bool] = []

    def run(*args: Any, **kwargs: Any) -> Any:
        is_first = not has_run
        has_run.append(True)
        with nullcontext() if is_first else ShardedDraws(draws, ranks, number):
            return forward(*args, **kwargs)

    return run
