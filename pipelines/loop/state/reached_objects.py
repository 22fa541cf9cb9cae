"""The objects that a script has made, as far as they can be reached from its variables."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

MOST_PARTS = 100
"""The items of a container that are looked at."""
MOST_REACHED = 10_000
"""The objects that are looked at, the nearest first."""


def reached(
    values: Iterable[Any],
    depth: int,
    parts_of: Callable[[Any], Iterable[Any]],
    most: int = MOST_REACHED,
) -> Iterator[Any]:
    """The values, then what they consist of by `parts_of`, and so on `depth` times. Each object
    once."""
    known: set[int] = set()
    level = [*values]
    num_looked_at = 0
    for _ in range(depth + 1):
        parts: list[Any] = []
        for value in level:
            num_looked_at += 1
            if num_looked_at > most:
                return
            if id(value) not in known:
                known.add(id(value))
                yield value
                if len(parts) < most:
                    parts += parts_of(value)
        level = parts


def items_of(value: Any) -> Iterable[Any]:
    """The first items of a container; nothing of all else."""
    if isinstance(value, dict):
        return islice(value.values(), MOST_PARTS)
    return value[:MOST_PARTS] if isinstance(value, list | tuple) else ()
