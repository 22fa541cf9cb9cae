"""The result of a check, and the limits at which checks warn or fail."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

CheckVerdict = Literal["ok", "warning", "failed"]


@dataclass(frozen=True)
class Finding:
    """One row of the report: the check, its result, its verdict and the fix of a problem."""

    check: str
    value: str
    verdict: CheckVerdict = "ok"
    fix: str = ""


@dataclass(frozen=True)
class Bounds:
    """Limits below which (clock skew and swap: above which) a check warns; a second value is the
    limit below which it fails."""

    disk_bytes: tuple[int, int] = (20 * 10**9, 10**9)
    storage_bytes_per_s: int = 20 * 10**6
    clock_skew_s: float = 2.0
    open_files: tuple[int, int] = (4096, 256)
    shared_memory_bytes: int = 10**9
    swap_used_share: float = 0.1
    """As a fraction of the machine's memory."""


BOUNDS = Bounds()


def verdict_of(value: float, bounds: tuple[float, float]) -> CheckVerdict:
    """The verdict on a value for two lower limits: the one to warn at and the one to fail at."""
    warn_below, fail_below = bounds
    return "failed" if value < fail_below else "warning" if value < warn_below else "ok"
