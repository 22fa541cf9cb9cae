"""Sampling interval of a worker's system metrics: it bounds the line rate of `system.jsonl`."""

from __future__ import annotations

LEAST_EVERY_S = 10.0
MAX_SAMPLES_A_S = 2.0
"""The rate of all workers together. At about 250 bytes a line that is 43 MB a day."""


def sample_every_s(num_workers: int) -> float:
    """The seconds between two samples of one worker, if there are `num_workers`."""
    return max(LEAST_EVERY_S, num_workers / MAX_SAMPLES_A_S)
