"""The ring of step records returns what was appended, also beyond its capacity."""

from __future__ import annotations

from dataclasses import fields
from random import Random

import pytest

from elastic.protocol.step_records import NUM_KEPT_RECORDS, RecordRing
from elastic.protocol.votes import SPLIT, StepRecord


def make_record(step: int, generation: int = 3) -> StepRecord:
    numbers = (1.5e9, step, generation, 12, 2.1 + step, 2**40, 0.3, 0.7, 0.05)
    return StepRecord(
        *numbers, True, True, *(0.1 * place for place in range(1, 7)), {"accuracy": 0.5}
    )


def steps_in(ring: RecordRing, after: int = 0, limit: int = 10**9) -> list[int]:
    return [record.step for record in ring.after(after, limit)]


def test_every_field_survives_packing() -> None:
    """A new field of the record must be added to the packed form."""
    ring = RecordRing()
    ring.append(make_record(1))
    assert ring.after(0) == (make_record(1),)
    assert all(getattr(make_record(1), f.name) for f in fields(StepRecord)), (
        "give each field a value"
    )


@pytest.mark.parametrize("name", ["loss", "tokens", "lr", "grad_norm", "step_s"])
def test_null_differs_from_zero(name: str) -> None:
    ring = RecordRing()
    null = StepRecord(**{**{f.name: 0 for f in fields(StepRecord)}, "step": 1, name: None})
    ring.append(null)
    [unpacked] = ring.after(0)
    assert getattr(unpacked, name) is None
    assert [f.name for f in fields(StepRecord) if getattr(unpacked, f.name) is None] == [name]


@pytest.mark.parametrize("capacity", [1, 7, 1024, 3000])
def test_oldest_records_are_dropped_beyond_the_capacity(capacity: int) -> None:
    ring = RecordRing(capacity)
    for step in range(1, 3 * capacity + 500):
        ring.append(make_record(step))
    kept_steps = steps_in(ring)
    assert kept_steps == list(range(kept_steps[0], 3 * capacity + 500))
    assert capacity <= len(kept_steps) <= capacity + 1024
    assert steps_in(ring, after=kept_steps[-1] - 1) == kept_steps[-1:]
    assert steps_in(ring, limit=5) == kept_steps[:5]


def test_a_record_without_a_split_keeps_none() -> None:
    ring = RecordRing()
    ring.append(StepRecord(*(0.0, 1, 1, 1, 1.0, 1, 0.1, 1.0, 0.5), skipped=False))
    [unpacked] = ring.after(0)
    assert [getattr(unpacked, name) for name in SPLIT] == [None] * len(SPLIT)


def test_full_ring_takes_less_than_17_mb() -> None:
    ring = RecordRing()
    for step in range(1, NUM_KEPT_RECORDS + 5000):
        ring.append(make_record(step))
    assert sum(len(block) for block in ring._blocks) < 17e6


@pytest.mark.parametrize("seed", range(20))
def test_ring_equals_a_plain_list_under_any_order_of_calls(seed: int) -> None:
    random = Random(seed)
    ring = RecordRing(random.choice((3, 40, 2000)))
    plain: list[StepRecord] = []
    for number in range(2000):
        draw = random.random()
        last = plain[-1].step if plain else random.randrange(50)
        if draw < 0.97:
            plain.append(make_record(last + 1, number))
            ring.append(plain[-1])
        elif draw < 0.98:
            step = random.randint(max(0, last - 60), last + 2)
            plain = [record for record in plain if record.step <= step]
            ring.truncate(step)
        elif draw < 0.99:
            repeated = make_record(max(1, last - random.randrange(40)), number)
            plain = [*(record for record in plain if record.step < repeated.step), repeated]
            plain = plain if len(plain) == 1 or plain[-2].step == repeated.step - 1 else [repeated]
            ring.append(repeated)
        else:
            later = make_record(last + 2, number)
            plain = [later]
            ring.append(later)
        assert list(ring.after(0, 10**9)) == plain[len(plain) - len(ring) :]
