"""Tensors in nested containers, such as a batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor


def mapped(function: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """Apply a function to each tensor in nested mappings, lists and (named) tuples; other values
    stay."""
    match tree:
        case Tensor():
            return function(tree)
        case Mapping():
            return {key: mapped(function, value) for key, value in tree.items()}
        case tuple() if hasattr(tree, "_fields"):
            return type(tree)(*(mapped(function, value) for value in tree))
        case list() | tuple():
            return type(tree)(mapped(function, value) for value in tree)
        case _:
            return tree


def tensors_in(tree: Any) -> Iterator[Tensor]:
    """Yield each tensor in order."""
    match tree:
        case Tensor():
            yield tree
        case Mapping():
            for value in tree.values():
                yield from tensors_in(value)
        case list() | tuple():
            for value in tree:
                yield from tensors_in(value)
