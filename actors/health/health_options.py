"""Which checks a worker's machine has to pass."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class HealthOptions:
    """See the settings `health`."""

    check: str | None = None
    slow_factor: float = 0.0
    device_errors: bool = False
