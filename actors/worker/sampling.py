"""How often a worker samples its machine: `system.jsonl` gets bounded lines a second."""

from __future__ import annotations

LEAST_EVERY_S = 10.0
MAX_SAMPLES_A_S = 2.0
"""Of all workers together; at some 250 bytes a line 43 MB a day."""


def sample_every_s(num_workers: int) -> float:
    """The seconds between two samples of one of so many workers."""
    return max(LEAST_EVERY_S, num_workers / MAX_SAMPLES_A_S)
