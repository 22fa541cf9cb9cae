"""Custom pipelines: a module's blocks as stages, and its loss split around the module's call.

The loss runs twice: once to find the input of the first block, once to turn the last block's output
into a loss.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from actors.distributed.torch_private import is_view
from pipelines.errors import UserError
from pipelines.settings.overrides import similar_names
from pipelines.training.custom.modules.microbatch_draws import PassSeeds
from pipelines.training.workload.layer_tensors import other_tie
from pipelines.training.workload.workload import Layer, Style, nothing, starred


class CustomBatch(NamedTuple):
    """The output of the recipe's `collate` for `num_held` samples.

    `num_samples` of them count in the loss: all, or none in a padding microbatch.
    """

    value: Any
    num_samples: int
    num_held: int
    seeds: PassSeeds | None = None
    length: int = 0
    """The length of whole sequences, if this rank has a part of them."""


class UnfitForPipeline(UserError):
    """The reason why a recipe cannot run as a pipeline."""


class Chain:
    """The forward of a stage: calls its blocks in order, each with the output of the one before.

    `output` has the shape and dtype of the stage's output.
    """

    def __init__(self, blocks: Sequence[nn.Module], output: Tensor) -> None:
        self.blocks = tuple(blocks)
        self.output = output

    def __call__(self, hidden: Tensor) -> Tensor:
        if hidden.requires_grad and hidden.is_leaf:
            hidden = hidden.clone()  # a block may change it in place, which a leaf forbids
        for block in self.blocks:
            hidden = block(hidden)
        refuse_other_tensor(hidden, self.output, "a stage returns")
        return hidden.clone() if is_view(hidden) else hidden  # schedules detach it in place


def parts_of(module: nn.Module, pipeline: Sequence[str]) -> tuple[str, ...]:
    """The names of the blocks in forward order; a star stands for each number, in order.

    Raises `UserError` for a name that the module does not have, and for a block named twice.
    """
    names = [name for name, _ in module.named_modules(remove_duplicate=False)]
    parts: list[str] = []
    for wanted in pipeline:
        pattern = re.escape(wanted).replace(r"\*", r"\d+")
        matches = [name for name in names if name and re.fullmatch(pattern, name)]
        if not matches:
            known = list(dict.fromkeys([*names, *map(starred, names)]))
            raise UserError(f"pipeline: the module has no {wanted}; {similar_names(wanted, known)}")
        parts += sorted(matches, key=_numbers)
    for number, name in enumerate(parts):
        for other in parts[:number]:
            if _is_within(name, other) or _is_within(other, name):
                raise UserError(f"pipeline: {name} is named twice, also as {other}; name it once")
    return tuple(parts)


def layers_of(
    module: nn.Module, parts: Sequence[str], styles: Mapping[str, Style]
) -> tuple[Layer, ...]:
    """The units that are distributed to stages.

    A block without trained parameters joins the next block (the last one the block before), so each
    stage has parameters to step. Blocks also join if `tp` shards the tensor between them.

    A unit's cost is its number of parameters; an embedding counts one row. So the cost is known
    without a pass and is the same on each machine.
    """
    groups: list[list[str]] = [[]]
    for name in parts:
        groups[-1].append(name)
        blocks = [module.get_submodule(member) for member in groups[-1]]
        is_trained = any(value.requires_grad for block in blocks for value in block.parameters())
        if is_trained and not _has_sharded_output(module, groups[-1], styles):
            groups.append([])
    *closed, rest = groups
    if closed:
        closed[-1] += rest
    return tuple(
        Layer(tuple(names), sum(_cost(module.get_submodule(name)) for name in names))
        for names in closed or [rest]
        if names
    )


def _has_sharded_output(
    module: nn.Module, parts: Sequence[str], styles: Mapping[str, Style]
) -> bool:
    """Whether `tp` shards the output of these blocks: a colwise layer without a rowwise one."""
    names = [name for name, _ in module.named_modules() if any(_is_within(name, p) for p in parts)]
    used = [styles.get(name) for name in names]
    return "colwise" in used and "rowwise" not in used


def why_not_sequential(
    module: nn.Module, parts: Sequence[str], blocks: Sequence[str], layers: Sequence[Layer]
) -> str | None:
    """The reason why the parts cannot be on different stages, or None.

    `blocks` are the modules that are sharded one by one, `layers` are those of the parts.
    """
    for name in module.state_dict():
        if not any(_is_within(name, part) for part in parts):
            return f"the recipe's pipeline leaves out {name}; move it into a block"
    owner: dict[Tensor, str] = {}
    for name, buffer in module.named_buffers(remove_duplicate=False):
        part = next((part for part in parts if _is_within(name, part)), None)
        if part is not None and owner.setdefault(buffer, part) != part:
            return f"{owner[buffer]} and {part} of the recipe's pipeline share {name}"
    if (names := other_tie(layers, module)) is not None:
        return (
            f"{names[0]} and {names[1]} of the recipe's pipeline are one weight, which only the "
            "first and the last block with weights can share"
        )
    for block in blocks:
        if any(_is_within(part, block) and part != block for part in parts):
            return f"{block} is sharded as one, but the recipe's pipeline splits it: set `blocks`"
    return None


def inputs_of(loss: Callable[[Any, Any], Any], batch: Any, training: bool = True) -> Tensor:
    """The tensor that a loss calls its module with. Raises `UnfitForPipeline`."""
    try:
        loss(_InputProbe(training), batch)
    except _InputsKnown as known:
        return known.inputs
    raise UnfitForPipeline("the recipe's loss does not call its module")


def module_returning(
    output: Tensor, training: bool = True, called: Callable[[], None] = nothing
) -> Any:
    """A substitute module for a loss: returns `output`, once, after calling `called`. Raises
    `UnfitForPipeline` if it is used otherwise."""
    return _OutputReplay(output, training, called)


def pad_rows(inputs: Tensor, num_rows: int) -> Tensor:
    """The inputs repeated cyclically up to `num_rows` rows."""
    if not 0 < len(inputs) < num_rows:
        return inputs
    return inputs[torch.arange(num_rows, device=inputs.device) % len(inputs)]


def unpad_rows(output: Tensor, num_samples: int, num_padded: int) -> Tensor:
    """The output's rows of the first `num_samples` samples of a batch padded to `num_padded`."""
    if num_samples == num_padded or not output.ndim:
        return output
    return output[: len(output) * num_samples // num_padded]


def refuse_other_tensor(value: Any, expected: Tensor, subject: str) -> None:
    """Raise `UnfitForPipeline` for anything but a tensor of the expected shape and dtype."""
    if not isinstance(value, Tensor):
        raise UnfitForPipeline(
            f"{subject} {type(value).__name__}, but a pipeline passes on one tensor"
        )
    if (value.shape, value.dtype) != (expected.shape, expected.dtype):
        raise UnfitForPipeline(
            f"{subject} {tuple(value.shape)} of {value.dtype}, not {tuple(expected.shape)} of "
            f"{expected.dtype}: tensors in a pipeline must have one shape in all microbatches"
        )


class _InputsKnown(BaseException):
    """Unwinds a loss that has called its module."""

    def __init__(self, inputs: Tensor) -> None:
        self.inputs = inputs


class _Substitute:
    """Takes the place of a module in a loss, which may only call it."""

    def __init__(self, training: bool) -> None:
        self.training = training

    def __getattr__(self, name: str) -> NoReturn:
        raise UnfitForPipeline(
            f"the recipe's loss uses {name} of its module, but in a pipeline no worker has the "
            "whole module: let the loss only call it"
        )


class _InputProbe(_Substitute):
    """Raises the inputs that the loss calls its module with."""

    def __call__(self, *inputs: Any, **keywords: Any) -> NoReturn:
        if len(inputs) != 1 or keywords or not isinstance(inputs[0], Tensor) or not inputs[0].ndim:
            arguments = ", ".join(
                [*(type(value).__name__ for value in inputs), *(f"{k}=" for k in keywords)]
            )
            raise UnfitForPipeline(
                f"the recipe's loss calls its module with ({arguments}), but the first block of a "
                "pipeline takes one tensor"
            )
        if any(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")):
            raise UnfitForPipeline(
                "the recipe's loss calls its module under autocast, which does not reach the other "
                "stages of a pipeline: set dtype=bfloat16, or enter autocast in the blocks"
            )
        raise _InputsKnown(inputs[0])


class _OutputReplay(_Substitute):
    """Returns a given output, once."""

    def __init__(self, output: Tensor, training: bool, called: Callable[[], None]) -> None:
        super().__init__(training)
        self.output: Tensor | None = output
        self._called = called

    def __call__(self, *inputs: Any, **keywords: Any) -> Tensor:
        output, self.output = self.output, None
        if output is None:
            raise UnfitForPipeline(
                "the recipe's loss calls its module twice, but a pipeline runs once"
            )
        self._called()
        return output if self.training else output.clone()  # a metric may change it in place


def _is_within(name: str, module: str) -> bool:
    return name == module or name.startswith(f"{module}.")


def _numbers(name: str) -> list[int]:
    return [int(part) for part in name.split(".") if part.isdecimal()]


def _cost(part: nn.Module) -> int:
    costs = [
        module.embedding_dim if isinstance(module, nn.Embedding) else weight.numel()
        for module in part.modules()
        for weight in module.parameters(recurse=False)
    ]
    return max(1, sum(costs))
