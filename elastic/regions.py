"""Regions: axis-aligned boxes of a logical tensor, and their overlaps."""

from __future__ import annotations

from math import prod
from typing import NamedTuple


class Region(NamedTuple):
    """A box of one logical tensor: where it begins and how far it goes, in elements."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        return prod(self.shape)
