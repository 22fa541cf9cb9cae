"""Backoff: how long to wait after the n-th failure in a row."""

from __future__ import annotations

MAX_DOUBLINGS = 16


def backoff_s(first_s: float, num_failures: int, longest_s: float) -> float:
    """In seconds: `first_s` after the first, doubled after each other, up to `longest_s`."""
    return min(first_s * 2.0 ** min(num_failures - 1, MAX_DOUBLINGS), longest_s)
