"""Trial of a plan with values: the whole module, and its sharded layers on virtual ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from pipelines.errors import UserError
from pipelines.training.tensor.unsharded_hidden import cut_parameters
from pipelines.training.tensor.virtual_ranks import VirtualRank, run_on_ranks
from pipelines.training.workload.drawing import (
    ATTENTION,
    FILLS,
    NEW,
    drawn_shape,
    first_tensor,
    is_in_place,
)
from pipelines.training.workload.seeds import generator_states
from pipelines.training.workload.state import TP_DIMS
from pipelines.training.workload.trees import tensors_in
from pipelines.training.workload.workload import ModelShape, Style

CPU = torch.device("cpu")
TOLERANCE = {torch.float64: 1e-7, torch.float32: 1e-3}
"""The largest difference, relative to the largest value of a tensor, that rounding may make."""

COARSE = 0.1
"""The same for other types, and for all that is computed from them."""
CONSTANT = 0.5
"""What is drawn instead of a random number; a dropout keeps everything."""
SMALL = 1e-3
"""A tensor of this share of the largest values may be all rounding."""


class ConstantDraws(TorchFunctionMode):
    """Draws constants instead of random numbers: the virtual ranks share one generator."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        shape = drawn_shape(function, args, kwargs)
        if shape is None:
            return function(*args, **kwargs)
        if function is ATTENTION:
            others = {key: value for key, value in kwargs.items() if key != "dropout_p"}
            return function(*args[:4], *((0.0, *args[5:]) if args[4:] else ()), **others)
        if function in FILLS:
            return args[0].fill_(CONSTANT)
        if "dropout" in function.__name__:
            tensor = first_tensor(args, kwargs)
            return tensor if is_in_place(args, kwargs) else tensor * 1.0
        if function in NEW:
            return torch.full(shape, CONSTANT, dtype=kwargs.get("dtype"))
        return torch.full_like(first_tensor(args, kwargs), CONSTANT)


class Untried(Exception):
    """The reason why a module cannot be tried out."""


class _Computed(NamedTuple):
    """What a rank has computed: the outputs of its modules in order, the loss, and gradients."""

    outputs: list[tuple[str, list[Tensor]]]
    loss: Tensor
    gradients: dict[str, Tensor]
    """Of the parameters that have one."""


class Scale(NamedTuple):
    """How large the compared tensors are, and whether some have few digits."""

    largest: float
    is_coarse: bool


def refuse_other_values(
    modules: Sequence[nn.Module], shape: ModelShape, call: Callable[[nn.Module], Tensor]
) -> None:
    """Raise `UserError` unless the loss of `call(module)`, the outputs of modules and the gradients
    are those of the whole module if its layers are sharded.

    `modules` are equal copies on the host: a whole one, and one for each rank, which it cuts.
    """
    whole, *copies = modules
    states = generator_states(CPU)
    expected = _compute(whole, call)
    if generator_states(CPU) != states:
        raise Untried("the module draws random numbers that the ranks cannot share in a trial")
    computed = run_on_ranks([partial(_compute_sharded, copy, shape, call) for copy in copies])
    subject = f"tp={len(copies)}: with the layers of the plan sharded"
    outputs = [value for _, values in expected.outputs for value in values]
    scale = Scale(_largest(outputs), any(map(_is_coarse, outputs)))
    for (name, values), (other, parts) in zip(expected.outputs, computed[0].outputs, strict=False):
        if name != other:
            break  # modules are called in another order
        if not all(map(partial(_is_alike, scale=scale), values, parts)):
            raise UserError(
                f"{subject}, {name or 'the module'} returns other values: a rank's parts of the "
                "layers before it are used otherwise than by their order, as when chunk cuts the "
                "output of a fused layer; leave that layer out of the plan, or split it in two"
            )
    if not all(_is_alike(expected.loss, rank.loss, scale) for rank in computed):
        raise UserError(f"{subject}, the loss is another one")
    scale = scale._replace(largest=_largest(expected.gradients.values()))
    for name, gradient in expected.gradients.items():
        style = shape.style_of(name.rpartition(".")[0])
        if not _is_gradient(gradient, [c.gradients.get(name) for c in computed], style, scale):
            raise UserError(
                f"{subject}, {name} gets another gradient: it meets a rank's part of a tensor; use "
                "it where the tensor is whole, or plan the layers around it otherwise"
            )


def _compute_sharded(
    module: nn.Module, shape: ModelShape, call: Callable[[nn.Module], Tensor], rank: VirtualRank
) -> _Computed:
    cut_parameters(module, shape, rank)
    return _compute(module, call)


def _compute(module: nn.Module, call: Callable[[nn.Module], Tensor]) -> _Computed:
    outputs: list[tuple[str, list[Tensor]]] = []

    def note(name: str, part: nn.Module, inputs: Any, output: Any) -> None:
        outputs.append((name, [tensor.detach().clone() for tensor in tensors_in(output)]))

    for name, part in module.named_modules():
        part.register_forward_hook(partial(note, name))
    with ConstantDraws():
        loss = call(module)
    loss.backward()
    named = ((name, parameter.grad) for name, parameter in module.named_parameters())
    gradients = {name: gradient for name, gradient in named if gradient is not None}
    return _Computed(outputs, loss.detach(), gradients)


def _largest(tensors: Iterable[Tensor]) -> float:
    """The largest finite absolute value in some tensors."""
    sizes = [_finite(value).abs().max().item() for value in tensors if _is_compared(value)]
    return max(sizes, default=0.0)


def _is_compared(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.numel() > 0


def _is_gradient(
    whole: Tensor, parts: Sequence[Tensor | None], style: Style | None, scale: Scale
) -> bool:
    """Whether these are the gradients that the ranks get for the whole one."""
    held = [part for part in parts if part is not None]
    if len(held) != len(parts):
        return False
    if style == "partial":
        return _is_alike(whole, torch.stack(held).sum(0), scale)
    dim = TP_DIMS.get(style) if style else None
    if dim is not None and dim < whole.ndim:
        return _is_alike(whole, torch.cat(held, dim), scale)
    return all(_is_alike(whole, part, scale) for part in held)


def _is_alike(expected: Tensor, actual: Tensor, scale: Scale) -> bool:
    """Whether two tensors agree up to rounding, which follows their own largest value or that of
    all. Masks have infinite values at the same places. Other shapes are not compared."""
    if expected.shape != actual.shape or not _is_compared(expected):
        return True
    is_finite = expected.isfinite()
    if not torch.equal(expected[~is_finite].nan_to_num(), actual[~is_finite].nan_to_num()):
        return False
    tolerance = COARSE if scale.is_coarse else TOLERANCE.get(expected.dtype, COARSE)
    largest = max(_finite(expected).abs().max().item(), SMALL * scale.largest)
    difference = torch.where(is_finite, expected - actual, 0.0).abs().max().item()
    return difference <= tolerance * largest


def _finite(tensor: Tensor) -> Tensor:
    return torch.where(tensor.isfinite(), tensor, 0.0)


def _is_coarse(tensor: Tensor) -> bool:
    """Whether it is of a type that autocast computes in: what follows from it is as coarse."""
    return tensor.dtype in (torch.bfloat16, torch.float16)
