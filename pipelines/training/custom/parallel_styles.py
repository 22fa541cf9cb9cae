"""The words of a recipe's `plan`: strings, or instances of torch's parallel styles.

torch's styles say which layout a tensor has before and behind a module. Here activations are whole
on each `tp` rank, except between a colwise and a rowwise layer. So a tensor that a style shards
over the batch or the sequence is kept whole: the values of the logical tensor are the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any, Literal

from torch import nn
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)
from torch.nn.utils.parametrize import is_parametrized

from pipelines.errors import UserError
from pipelines.training.workload.workload import Style, starred

CustomCut = Literal["colwise", "rowwise"] | ParallelStyle
"""What a plan may say of a layer."""
WIDTH = Shard(-1)
WHOLE: tuple[Placement | None, ...] = (None, Replicate(), Shard(0), Shard(1))
"""Layouts of tensors that are kept whole: those sharded by samples or tokens, too."""
KNOWN = (
    "ColwiseParallel, RowwiseParallel, SequenceParallel, PrepareModuleInput, PrepareModuleOutput, "
    "'colwise' or 'rowwise'"
)


def names_matching(pattern: str, names: Iterable[str]) -> list[str]:
    """The module names that a name in a plan means: a star is any number, or else, as in torch, any
    text within a part of the name."""
    every = list(names)
    numbers = [name for name in every if starred(name) == pattern]
    if numbers:
        return numbers
    wanted = pattern.split(".")
    return [
        name
        for name in every
        if len(parts := name.split(".")) == len(wanted)
        and all(fnmatchcase(part, atom) for part, atom in zip(parts, wanted, strict=True))
    ]


def style_of(name: str, planned: Any, parts: Sequence[nn.Module]) -> Style | None:
    """The style of these modules of one name; None: each rank has them whole.

    Raises `UserError` for what is not possible.
    """
    is_linear = all(isinstance(part, nn.Linear) for part in parts)
    is_embedding = all(isinstance(part, nn.Embedding) for part in parts)
    kind = type(planned)
    if planned == "rowwise" or kind is RowwiseParallel:
        _refuse_other_forward(name, parts)
    if any(is_parametrized(part) for part in parts):
        raise UserError(f"plan: {name} is parametrized, so that tp cannot shard its weight")
    if kind is ColwiseParallel and is_linear:
        return _style_of_columns(name, planned)
    if kind is RowwiseParallel and (is_linear or is_embedding):
        _refuse_other_layouts(name, kind.__name__, "output_layouts", planned.output_layouts)
        return "rowwise" if is_linear else "vocabulary"
    if kind is SequenceParallel:
        [sharding] = planned.sequence_sharding
        # Behind the tokens are the heads, of which each rank has its own.
        return "partial" if sharding not in WHOLE else None
    if kind in (PrepareModuleInput, PrepareModuleOutput, PrepareModuleInputOutput):
        _refuse_sharded_width(name, planned)
        return None
    if planned == "colwise" and is_linear:
        return "colwise"
    if planned == "rowwise" and (is_linear or is_embedding):
        return "rowwise" if is_linear else "vocabulary"
    if kind not in (str, ColwiseParallel, RowwiseParallel):
        raise UserError(f"plan: {name} has {kind.__name__}, which is not known here: use {KNOWN}")
    names = ", ".join(sorted({type(part).__name__ for part in parts}))
    said = planned if isinstance(planned, str) else kind.__name__
    raise UserError(
        f"plan: {name} is {names} and cannot be {said}: nn.Linear can be colwise "
        "or rowwise, nn.Embedding rowwise"
    )


def _refuse_other_forward(name: str, parts: Sequence[nn.Module]) -> None:
    """Raise `UserError` for layers whose own computation is not torch's, which takes its place."""
    for part in parts:
        known = nn.Linear.forward if isinstance(part, nn.Linear) else nn.Embedding.forward
        is_known = type(part).forward is known and getattr(part, "max_norm", None) is None
        if isinstance(part, nn.Linear | nn.Embedding) and not is_known:
            raise UserError(
                f"plan: {name} is {type(part).__name__}, which computes more than torch's "
                f"{'Linear' if isinstance(part, nn.Linear) else 'Embedding'}: it cannot be rowwise"
            )


def _style_of_columns(name: str, planned: ColwiseParallel) -> Style:
    _refuse_other_layouts(name, "ColwiseParallel", "input_layouts", planned.input_layouts)
    [output] = planned.output_layouts
    if output == WIDTH:
        # A DTensor has the whole width for the code behind it.
        return "colwise" if planned.use_local_output else "colwise_gathered"
    _refuse_other_layouts(name, "ColwiseParallel", "output_layouts", planned.output_layouts)
    return "colwise_gathered"


def _refuse_sharded_width(name: str, planned: Any) -> None:
    kind = type(planned).__name__
    is_both = isinstance(planned, PrepareModuleInputOutput)
    both = (planned.prepare_module_input, planned.prepare_module_output) if is_both else (planned,)
    for prepared in both:
        for field, layouts in vars(prepared).items():
            if isinstance(layouts, dict):
                layouts = layouts.values()
            if field.endswith("layouts") and layouts is not None:
                _refuse_other_layouts(name, kind, field, layouts)


def _refuse_other_layouts(
    name: str, kind: str, field: str, layouts: Iterable[Placement | None]
) -> None:
    for layout in layouts:
        if layout not in WHOLE:
            raise UserError(
                f"plan: {name} has {kind}({field}={layout}), which is not possible here: tensors "
                "are whole (Replicate(), Shard(0), Shard(1)) except from a ColwiseParallel layer's "
                "output to a RowwiseParallel layer's input (Shard(-1))"
            )
