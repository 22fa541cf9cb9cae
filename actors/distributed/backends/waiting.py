"""Calls that wait for other ranks outside of Python."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

Returned = TypeVar("Returned")


def waiting(call: Callable[..., Returned], *arguments: Any) -> Returned:
    """Call a function that is not Python code and waits for other ranks, in a frame that
    `StallDetector` recognizes as a wait in torch."""
    return call(*arguments)
