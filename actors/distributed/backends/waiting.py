"""Calls that wait for other ranks outside of Python."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

Returned = TypeVar("Returned")


def waiting(call: Callable[..., Returned], *arguments: Any) -> Returned:
    """Call a function that is not Python code and waits for other ranks, in a frame that
    `StallDetector` recognizes as a wait in torch."""
    return call(*arguments)


def launching(call: Callable[..., Returned], *arguments: Any, **keywords: Any) -> Returned:
    """Launch an exchange of two or more ranks, in a frame that `StallDetector` recognizes.

    NCCL connects two ranks when they first exchange. The launch waits for that, and an abort does
    not end the wait, so the thread may be left behind."""
    return call(*arguments, **keywords)
