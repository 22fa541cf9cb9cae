"""A rank's next pass is read early: the same batch, read once, and errors where they belong."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from elastic.geometry.sample_order import microbatch_seed, sample_of
from pipelines.settings import TrainSettings
from pipelines.training.passes.step_samples import StepSamples
from pipelines.training.workload.data_shard import draw_steps, microbatch_sample_ids
from pipelines.training.workload.workload import SeededSamples, nothing

SETTINGS = TrainSettings(batch=8, microbatch=2, steps=3)
ROUNDS = ((0, 1), (3,))


class ReadWorkload:
    """What `StepSamples` uses of a workload; it records what is read."""

    num_samples = 100
    is_far = has_readers = False

    def __init__(self) -> None:
        self.read: list[list[SeededSamples]] = []
        self.is_broken = False

    def read_pass(self, parts: list[SeededSamples], interrupt: Any = nothing) -> Any:
        self.read.append(parts)
        if self.is_broken:
            raise OSError("cannot be read")
        return [sample for part in parts for sample in part.samples]


def read_step(samples: StepSamples, step: int, rounds: Any = ROUNDS, skipped: Any = ()) -> Any:
    samples.draw(step, rounds, skipped)
    return [samples.read(samples.parts(microbatches), nothing) for microbatches in rounds]


@pytest.fixture
def workload() -> ReadWorkload:
    return ReadWorkload()


def test_early_batches_equal_the_others_and_are_read_once(workload: ReadWorkload) -> None:
    plain, early = StepSamples(ReadWorkload(), SETTINGS), StepSamples(workload, SETTINGS)
    for step in (1, 2, 3):
        assert read_step(early, step) == read_step(plain, step)
        early.read_early()
    assert len(workload.read) == 3 * len(ROUNDS), "nothing is read for a step after the last"


@pytest.mark.parametrize("microbatches", [(), (1, 3), range(300)], ids=len)
def test_steps_drawn_at_once_equal_each_step_alone(microbatches: Sequence[int]) -> None:
    settings, num_samples = TrainSettings(batch=600, microbatch=2, steps=300), 1000
    drawn = list(draw_steps(settings, num_samples, range(2, 301), microbatches, (7,)))
    assert len(drawn) == 299
    for step, parts in enumerate(drawn, 2):
        assert list(parts) == list(microbatches)
        for microbatch, part in parts.items():
            ids = microbatch_sample_ids(settings, step, microbatch, (7,))
            assert part.samples == [sample_of(settings.seed, i, num_samples) for i in ids]
            assert part.seed == microbatch_seed(settings.seed, step, microbatch)


@pytest.mark.parametrize(
    ("rounds", "skipped"), [(((0, 1, 3),), ()), (ROUNDS, (1,)), (((), (3,)), ())], ids=str
)
def test_batch_that_is_not_wanted_is_dropped(
    workload: ReadWorkload, rounds: Any, skipped: Any
) -> None:
    """The first step of a generation has other passes than the second, for example."""
    early = StepSamples(workload, SETTINGS)
    read_step(early, 1)
    early.read_early()
    rounds = tuple(filter(None, rounds))
    expected = read_step(StepSamples(ReadWorkload(), SETTINGS), 2, rounds, skipped)
    assert read_step(early, 2, rounds, skipped) == expected


def test_error_is_raised_by_the_step_that_needs_the_batch(workload: ReadWorkload) -> None:
    early = StepSamples(workload, SETTINGS)
    read_step(early, 1)
    workload.is_broken = True
    early.read_early()
    with pytest.raises(OSError, match="cannot be read"):
        read_step(early, 2)


@pytest.mark.parametrize("name", ["is_far", "has_readers"])
def test_what_others_read_ahead_is_not_read_early(workload: ReadWorkload, name: str) -> None:
    setattr(workload, name, True)
    early = StepSamples(workload, SETTINGS)
    early.read_early()
    read_step(early, 1)
    early.read_early()
    assert len(workload.read) == len(ROUNDS)
