"""Trial on the meta device: which draws of a module are for activations that `tp` shards."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from elastic.geometry.regions import chunk_interval
from pipelines.errors import UserError
from pipelines.training.tensor.sharded_draws import Draws, Shape, ShardedDraw, Unknown
from pipelines.training.tensor.unsharded_hidden import cut_parameters
from pipelines.training.workload.drawing import ATTENTION, drawn_shape, first_tensor
from pipelines.training.workload.trees import tensors_in
from pipelines.training.workload.workload import ModelShape, starred

RANK_0 = 0


class DrawRecorder(TorchFunctionMode):
    """Records the function and the shape of each draw."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn: list[tuple[str, Shape]] = []
        self.head_sizes: list[int] = []
        """Of each call of the attention."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        shape = drawn_shape(function, args, kwargs)
        if shape is not None:
            self.drawn.append((function.__name__, shape))
        if function is ATTENTION:
            self.head_sizes.append(first_tensor(args, kwargs).shape[-1])
        return function(*args, **kwargs)


class FirstOf:
    """Rank 0 of `size`, without others: a trial needs only shapes. See `TensorRanks`."""

    def __init__(self, size: int) -> None:
        self._size = size

    def rank(self) -> int:
        return RANK_0

    def size(self) -> int:
        return self._size

    def all_reduce(self, total: Tensor) -> None:
        """The values do not matter."""

    def all_gather(self, part: Tensor) -> Tensor:
        return part.expand(self._size, *part.shape).clone()


def for_trial(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A module on the meta device with all its tensors there, and parameters in this dtype."""
    module.to("meta")
    for parameter in module.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
    for part in module.modules():
        tensors = {key: value for key, value in vars(part).items() if isinstance(value, Tensor)}
        vars(part).update({key: value.to("meta") for key, value in tensors.items()})
    return module


@torch.no_grad()
def find_draws(
    whole: nn.Module, cut: nn.Module, shape: ModelShape, num_tp: int, call: Callable[..., Any]
) -> Draws:
    """The draws of `call(module)`, from two copies of a module on the meta device, of which it cuts
    one as `tp` does.

    Raises `UserError` if it cannot run with sharded layers, or if a replicated layer would get
    other gradients on each rank, and `Unknown` if it does not run even with whole layers.
    """
    try:
        before = _recorded(whole, shape, call)
    except Exception as error:  # a module that reads values, which the meta device has not
        raise Unknown(
            "tp: the module draws random numbers, but does not run on the meta device, so it is "
            f"unknown which are for sharded activations: {_one_line(error)}"
        ) from None
    cut_parameters(cut, shape, FirstOf(num_tp))
    try:
        after = _recorded(cut, shape, call)
    except Exception as error:
        raise UserError(
            f"tp={num_tp}: the module fails if its layers are sharded: {_one_line(error)}: from a "
            "colwise to a rowwise layer it has its part of the width, so write -1 for a number of "
            "heads"
        ) from None
    _refuse_other_inputs(before.inputs, after.inputs, shape)
    if before.head_sizes != after.head_sizes:
        raise UserError(
            f"tp={num_tp}: the attention gets parts of heads: keep the head size, and write -1 for "
            "the number of heads, as in hidden.unflatten(-1, (-1, head_size))"
        )
    if [name for name, _ in before.drawn] != [name for name, _ in after.drawn]:
        raise UserError("tp: the module draws other random numbers if its layers are sharded")
    return [
        _compared(name, whole_shape, part_shape, num_tp)
        for (name, whole_shape), (_, part_shape) in zip(before.drawn, after.drawn, strict=True)
    ]


class _Recorded(NamedTuple):
    """The draws of a call, and the shapes that the replicated trained modules have got."""

    drawn: list[tuple[str, Shape]]
    inputs: dict[str, list[Shape]]
    head_sizes: list[int]


def _recorded(module: nn.Module, shape: ModelShape, call: Callable[..., Any]) -> _Recorded:
    recorder, inputs = DrawRecorder(), dict[str, list[Shape]]()
    hooks = [
        part.register_forward_pre_hook(
            partial(_note_shapes, inputs.setdefault(name, [])), with_kwargs=True
        )
        for name, part in module.named_modules()
        if shape.style_of(name) in (None, "partial")
        and any(parameter.requires_grad for parameter in part.parameters(recurse=False))
    ]
    try:
        with torch.random.fork_rng(devices=[]), torch.device("meta"), recorder:
            call(module)
    finally:
        for hook in hooks:
            hook.remove()
    return _Recorded(recorder.drawn, inputs, recorder.head_sizes)


def _note_shapes(noted: list[Shape], part: nn.Module, args: Any, kwargs: Any) -> None:
    noted += [tuple(tensor.shape) for tensor in tensors_in((args, kwargs))]


def _refuse_other_inputs(
    whole: dict[str, list[Shape]], cut: dict[str, list[Shape]], shape: ModelShape
) -> None:
    """Raise `UserError` for a replicated module that sees a part of a tensor on each rank, unless
    its gradients are summed over the ranks, and for one that does not although they are."""
    for name, shapes in cut.items():
        style = f"{{'{starred(name)}': SequenceParallel(sequence_dim=2)}}"
        is_summed = shape.style_of(name) == "partial"
        if shapes != whole[name] and not is_summed:
            raise UserError(
                f"tp: {name} has parameters and would see only this rank's part of a tensor: use "
                f"it where the tensor is whole, or, if it treats heads alike, plan {style}"
            )
        if shapes and shapes == whole[name] and is_summed:
            raise UserError(
                f"tp: {name} sees whole tensors on each rank: leave it out of the plan, where it "
                f"is as in {style}"
            )


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def _compared(name: str, whole: Shape, part: Shape, num_tp: int) -> ShardedDraw | None:
    if whole == part:
        return None
    sizes = enumerate(zip(whole, part, strict=False))
    dims = [dim for dim, (before, after) in sizes if before != after]
    [dim, *others] = dims or [0]
    own = chunk_interval(whole[dim], num_tp, RANK_0)[1]
    if len(whole) != len(part) or others or not dim or part[dim] != own:
        raise UserError(
            f"tp: {name} draws for a tensor of shape {part}, which is no part of {whole} in one "
            "dim behind the first: draw where the tensor is whole"
        )
    return ShardedDraw(dim, whole[dim])
