"""`system.jsonl` stays small for any number of workers."""

from __future__ import annotations

from actors.ray_backend.sampling import LEAST_EVERY_S, sample_every_s

MAX_LINE_BYTES = 300


def test_lines_of_all_workers_per_day_are_bounded() -> None:
    for num_workers in (1, 2, 20, 21, 1_000, 100_000):
        num_lines_per_day = 86_400 * num_workers / sample_every_s(num_workers)
        assert num_lines_per_day * MAX_LINE_BYTES <= 60e6


def test_few_workers_are_sampled_often() -> None:
    assert sample_every_s(1) == sample_every_s(20) == LEAST_EVERY_S
