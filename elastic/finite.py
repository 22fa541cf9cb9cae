"""Numbers that may be absent: what is not finite has no place in a file, where it is null."""

from __future__ import annotations

from math import isfinite


def finite(value: float | None) -> float | None:
    """The value if it is finite, else None."""
    return value if value is not None and isfinite(value) else None
