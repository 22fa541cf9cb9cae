"""Samples of several files as one dataset: where each lies, and what another process gets."""

from __future__ import annotations

from bisect import bisect_right
from typing import Any, ClassVar


class Concatenated:
    """A map-style dataset of parts, such as files, one behind the other.

    A subclass sets `_ends` in `_open`: for each part the number of samples up to its end. Another
    process gets all attributes but the `opened` ones, which `_open` makes there when one is first
    used: when a worker's process unpickles the dataset, it does not know its run yet.
    """

    opened: ClassVar[tuple[str, ...]]
    _ends: list[int]

    def _open(self) -> None:
        raise NotImplementedError

    def __len__(self) -> int:
        return self._ends[-1]

    def _located(self, index: int) -> tuple[int, int]:
        """The part that has a sample, and the sample's index counted from the end of the part,
        which is negative. Raises `IndexError`."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        number = bisect_right(self._ends, index)
        return number, index - self._ends[number]

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in self.opened}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)

    def __getattr__(self, name: str) -> Any:
        if name not in type(self).opened:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        self._open()
        return vars(self)[name]
