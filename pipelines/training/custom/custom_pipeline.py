"""A module of the user's own as a pipeline: its blocks in a row, and its loss in two halves, what
the first block is given and what is made of the last one's output."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from pipelines.settings.errors import UserError
from pipelines.settings.overrides import near
from pipelines.training.workload.workload import Layer, Style, starred


class Unfit(UserError):
    """Why a recipe cannot be run as a pipeline."""


class Chain:
    """The blocks of a stage, each called with what the one before gives: replaces `forward`.

    `leaving` has the shape and dtype of what the stage gives.
    """

    def __init__(self, blocks: Sequence[nn.Module], leaving: Tensor) -> None:
        self.blocks = tuple(blocks)
        self.leaving = leaving

    def __call__(self, hidden: Tensor) -> Tensor:
        if hidden.requires_grad and hidden.is_leaf:
            hidden = hidden.clone()  # a block may change it in place, which no leaf allows
        for block in self.blocks:
            hidden = block(hidden)
        refuse_other(hidden, self.leaving, "a stage gives")
        return hidden.clone() if hidden._is_view() else hidden  # schedules detach it in place


def parts_of(module: nn.Module, pipeline: Sequence[str]) -> tuple[str, ...]:
    """The names of the blocks in forward order, a star being each number in order.

    Raises `UserError` for a name that the module has not, or what is named twice.
    """
    names = [name for name, _ in module.named_modules(remove_duplicate=False)]
    parts: list[str] = []
    for wanted in pipeline:
        pattern = re.escape(wanted).replace(r"\*", r"\d+")
        found = [name for name in names if name and re.fullmatch(pattern, name)]
        if not found:
            known = list(dict.fromkeys([*names, *map(starred, names)]))
            raise UserError(f"pipeline: the module has no {wanted}; {near(wanted, known)}")
        parts += sorted(found, key=_numbers)
    for number, name in enumerate(parts):
        for other in parts[:number]:
            if _is_within(name, other) or _is_within(other, name):
                raise UserError(f"pipeline: {name} is named twice, also as {other}")
    return tuple(parts)


def layers_of(
    module: nn.Module, parts: Sequence[str], styles: Mapping[str, Style]
) -> tuple[Layer, ...]:
    """What is dealt to stages. A block of which nothing is trained goes with the next one, or the
    last with the one before: no stage is without anything to step. So do blocks between which what
    flows is cut by `tp`.

    Their costs are their numbers of parameters, of an embedding those of one row: no pass is
    needed to know them, and they are the same on each machine.
    """
    groups: list[list[str]] = [[]]
    for name in parts:
        groups[-1].append(name)
        held = [module.get_submodule(one) for one in groups[-1]]
        is_trained = any(one.requires_grad for part in held for one in part.parameters())
        if is_trained and not _leaves_cut(module, groups[-1], styles):
            groups.append([])
    *closed, rest = groups
    if closed:
        closed[-1] += rest
    return tuple(
        Layer(tuple(names), sum(_cost(module.get_submodule(name)) for name in names))
        for names in closed or [rest]
        if names
    )


def _leaves_cut(module: nn.Module, parts: Sequence[str], styles: Mapping[str, Style]) -> bool:
    """Whether `tp` cuts what flows out of these blocks: there is no rowwise one for a colwise."""
    names = [name for name, _ in module.named_modules() if any(_is_within(name, p) for p in parts)]
    found = [styles.get(starred(name)) for name in names]
    return "colwise" in found and "rowwise" not in found


def why_not_alone(module: nn.Module, parts: Sequence[str], blocks: Sequence[str]) -> str | None:
    """Why the parts cannot lie on machines of their own, if so; `blocks` are sharded one by one."""
    owner: dict[Tensor, str] = {}
    tensors = [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]
    persistent = module.state_dict(keep_vars=True).keys()
    for name, value in tensors:
        part = next((part for part in parts if _is_within(name, part)), None)
        if part is None and name in persistent:
            return f"the recipe's pipeline leaves out {name}; have a block of it hold that"
        if part is not None and owner.setdefault(value, part) != part:
            return f"{owner[value]} and {part} of the recipe's pipeline share {name}"
    for block in blocks:
        if any(_is_within(part, block) and part != block for part in parts):
            return f"{block} is sharded as one, but the recipe's pipeline cuts it: name `blocks`"
    return None


def inputs_of(loss: Callable[[Any, Any], Any], batch: Any, training: bool = True) -> Tensor:
    """What a loss calls its module with. Raises `Unfit`."""
    try:
        loss(_Asking(training), batch)
    except _Asked as asked:
        return asked.inputs
    raise Unfit("the recipe's loss does not call its module")


def having_called(output: Tensor, training: bool = True) -> Any:
    """What a loss takes for a module that, called once, returns `output`. Raises `Unfit`."""
    return _Answering(output, training)


def filled_up(inputs: Tensor, num_rows: int) -> Tensor:
    """So many rows, those that are there over and over."""
    if not 0 < len(inputs) < num_rows:
        return inputs
    return inputs[torch.arange(num_rows, device=inputs.device) % len(inputs)]


def cut_back(output: Tensor, num_samples: int, num_filled: int) -> Tensor:
    """Of the output of so many samples, filled up, the rows of those that were there."""
    if num_samples == num_filled or not output.ndim:
        return output
    return output[: len(output) * num_samples // num_filled]


def refuse_other(given: Any, expected: Tensor, told: str) -> None:
    """Raises `Unfit` for anything but a tensor of this shape and dtype."""
    if not isinstance(given, Tensor):
        raise Unfit(f"{told} {type(given).__name__}, and a pipeline passes on one tensor")
    if (given.shape, given.dtype) != (expected.shape, expected.dtype):
        raise Unfit(
            f"{told} {tuple(given.shape)} of {given.dtype}, not {tuple(expected.shape)} of "
            f"{expected.dtype}: what flows through a pipeline has one shape in all microbatches"
        )


class _Asked(BaseException):
    """Unwinds a loss that has called its module."""

    def __init__(self, inputs: Tensor) -> None:
        self.inputs = inputs


class _StandIn:
    """For a module of which the loss may know nothing but its output."""

    def __init__(self, training: bool) -> None:
        self.training = training

    def __getattr__(self, name: str) -> NoReturn:
        raise Unfit(
            f"the recipe's loss uses {name} of its module, and in a pipeline nobody has the whole: "
            "have it only call the module"
        )


class _Asking(_StandIn):
    def __call__(self, *inputs: Any, **keywords: Any) -> NoReturn:
        if len(inputs) != 1 or keywords or not isinstance(inputs[0], Tensor) or not inputs[0].ndim:
            told = ", ".join(
                [*(type(one).__name__ for one in inputs), *(f"{k}=" for k in keywords)]
            )
            raise Unfit(
                f"the recipe's loss calls its module with ({told}), and the first block of a "
                "pipeline takes one tensor"
            )
        if any(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")):
            raise Unfit(
                "the recipe's loss calls its module under autocast, of which the other stages of a "
                "pipeline know nothing: set dtype=bfloat16, or enter autocast in the blocks"
            )
        raise _Asked(inputs[0])


class _Answering(_StandIn):
    def __init__(self, output: Tensor, training: bool) -> None:
        super().__init__(training)
        self.output: Tensor | None = output

    def __call__(self, *inputs: Any, **keywords: Any) -> Tensor:
        output, self.output = self.output, None
        if output is None:
            raise Unfit("the recipe's loss calls its module twice, and a pipeline runs once")
        return output if self.training else output.clone()  # a metric may change it in place


def _is_within(name: str, module: str) -> bool:
    return name == module or name.startswith(f"{module}.")


def _numbers(name: str) -> list[int]:
    return [int(part) for part in name.split(".") if part.isdecimal()]


def _cost(part: nn.Module) -> int:
    costs = [
        one.embedding_dim if isinstance(one, nn.Embedding) else weight.numel()
        for one in part.modules()
        for weight in one.parameters(recurse=False)
    ]
    return max(1, sum(costs))
