"""What a check has found, and the bounds by which it judges."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

CheckVerdict = Literal["ok", "warning", "failed"]


@dataclass(frozen=True)
class Finding:
    """One row: what was looked at, what is there, and how to mend it if it is not well."""

    what: str
    value: str
    verdict: CheckVerdict = "ok"
    mend: str = ""


@dataclass(frozen=True)
class Bounds:
    """Below (for skew and swap: above) these a check warns; where there are two, below the second
    it fails."""

    disk_bytes: tuple[int, int] = (20 * 10**9, 10**9)
    storage_bytes_per_s: int = 20 * 10**6
    clock_skew_s: float = 2.0
    open_files: tuple[int, int] = (4096, 256)
    shared_memory_bytes: int = 10**9
    swap_used_share: float = 0.1
    """Of the machine's memory."""


BOUNDS = Bounds()


def judged(value: float, bounds: tuple[float, float]) -> CheckVerdict:
    """By what it warns of and fails of, both as the least."""
    warned, failed = bounds
    return "failed" if value < failed else "warning" if value < warned else "ok"
