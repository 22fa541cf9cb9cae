"""Models whose blocks are all alike, so that trials need only a few of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

NUMBER = "num_hidden_layers"


def number_of_equal_blocks(model: nn.Module, fields: dict[str, Any], blocks: Sequence[str]) -> int:
    """How many blocks a model has if all are alike, and the config says their number; otherwise 0.

    Blocks are alike if they have the same class and parameters, and no list in the config has
    another value for one of them, as for layers with a window.
    """
    number = fields.get(NUMBER, 0)
    values: dict[str, Any] = model.config.to_dict()  # type: ignore[operator, union-attr]
    lists = [value for value in values.values() if _is_by_block(value, number)]
    kinds = {_kind(model.get_submodule(name)) for name in blocks}
    is_alike = number == len(blocks) and len(kinds) == 1
    return number if is_alike and all(item == by[0] for by in lists for item in by) else 0


def with_number(fields: dict[str, Any], number: int) -> dict[str, Any]:
    """The config of the same model with fewer blocks."""
    before = fields[NUMBER]
    cut = {name: by[:number] for name, by in fields.items() if _is_by_block(by, before)}
    return {**fields, **cut, NUMBER: number}


def _is_by_block(value: object, number: int) -> bool:
    return isinstance(value, list) and len(value) == number > 0


def _kind(block: nn.Module) -> tuple[object, ...]:
    parameters = sorted((name, tuple(p.shape)) for name, p in block.named_parameters())
    return type(block), *parameters
