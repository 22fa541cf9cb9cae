"""The ring of step records: what goes in comes out, also beyond its capacity."""

from __future__ import annotations

from dataclasses import fields
from random import Random

import pytest

from elastic.protocol.step_records import NUM_KEPT_RECORDS, RecordRing
from elastic.protocol.votes import StepRecord


def record(step: int, generation: int = 3) -> StepRecord:
    return StepRecord(
        1.5e9, step, generation, 12, 2.1 + step, 2**40, 0.3, 0.7, 0.05, skipped=True, missing=True
    )


def steps(ring: RecordRing, after: int = 0, limit: int = 10**9) -> list[int]:
    return [kept.step for kept in ring.after(after, limit)]


def test_every_field_survives() -> None:
    """A field that is added to the record must be added to the packed form."""
    ring = RecordRing()
    ring.append(record(1))
    assert ring.after(0) == (record(1),)
    assert all(getattr(record(1), f.name) for f in fields(StepRecord)), "give each field a value"


@pytest.mark.parametrize("name", ["loss", "tokens", "lr", "grad_norm", "step_s"])
def test_null_is_kept_apart_from_zero(name: str) -> None:
    ring = RecordRing()
    null = StepRecord(**{**{f.name: 0 for f in fields(StepRecord)}, "step": 1, name: None})
    ring.append(null)
    [kept] = ring.after(0)
    assert getattr(kept, name) is None
    assert [f.name for f in fields(StepRecord) if getattr(kept, f.name) is None] == [name]


@pytest.mark.parametrize("capacity", [1, 7, 1024, 3000])
def test_the_oldest_are_dropped_beyond_the_capacity(capacity: int) -> None:
    ring = RecordRing(capacity)
    for step in range(1, 3 * capacity + 500):
        ring.append(record(step))
    kept = steps(ring)
    assert kept == list(range(kept[0], 3 * capacity + 500))
    assert capacity <= len(kept) <= capacity + 1024
    assert steps(ring, after=kept[-1] - 1) == kept[-1:]
    assert steps(ring, limit=5) == kept[:5]


def test_a_full_ring_takes_a_few_megabytes() -> None:
    ring = RecordRing()
    for step in range(1, NUM_KEPT_RECORDS + 5000):
        ring.append(record(step))
    assert sum(len(block) for block in ring._blocks) < 10e6


@pytest.mark.parametrize("seed", range(20))
def test_any_order_of_calls_leaves_what_a_plain_list_leaves(seed: int) -> None:
    random = Random(seed)
    ring = RecordRing(random.choice((3, 40, 2000)))
    plain: list[StepRecord] = []
    for number in range(2000):
        draw = random.random()
        last = plain[-1].step if plain else random.randrange(50)
        if draw < 0.97:
            plain.append(record(last + 1, number))
            ring.append(plain[-1])
        elif draw < 0.98:
            step = random.randint(max(0, last - 60), last + 2)
            plain = [kept for kept in plain if kept.step <= step]
            ring.truncate(step)
        elif draw < 0.99:
            again = record(max(1, last - random.randrange(40)), number)
            plain = [*(kept for kept in plain if kept.step < again.step), again]
            plain = plain if len(plain) == 1 or plain[-2].step == again.step - 1 else [again]
            ring.append(again)
        else:
            later = record(last + 2, number)
            plain = [later]
            ring.append(later)
        assert list(ring.after(0, 10**9)) == plain[len(plain) - len(ring) :]
