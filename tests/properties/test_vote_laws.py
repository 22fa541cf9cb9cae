"""A vote survives a float64 sum all-reduce; a vote that an abort corrupted is refused."""

from __future__ import annotations

import math
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.protocol.votes import (
    NUM_ORDERS,
    Ballot,
    BrokenVote,
    Tally,
    pack_vote,
    unpack_vote,
)

NO_SUMS = (0.0, 0.0, 0.0)
FINITE = st.floats(-1e30, 1e30, allow_nan=False)
NORMS = st.floats(0.0, 1e30)


@st.composite
def votes(draw: st.DrawFn, min_workers: int = 1) -> list[Ballot]:
    """The ballots of all ranks for one step."""
    num_workers, step = draw(st.integers(min_workers, 9)), draw(st.integers(1, 10**7))
    is_timed = draw(st.booleans())
    ballots = []
    for rank in range(num_workers):
        times = [0.0] * num_workers if is_timed else []
        if is_timed:
            times[rank] = draw(st.floats(0.0, 100.0))
        sums = (draw(FINITE), float(draw(st.integers(0, 10**9))), draw(NORMS))
        flags = [draw(st.booleans()) for _ in range(3)]
        order = draw(st.none() | st.integers(0, 5) | st.integers(0, 2**20))
        ballots.append(Ballot(step, rank, sums, flags[0], order, *flags[1:], tuple(times)))
    return ballots


def all_reduce(packed: list[list[float]], seed: int = 0) -> list[float]:
    """The sums over the ranks, each element in its own order of addition, as in a ring."""
    random = Random(seed)
    columns = [list(column) for column in zip(*packed, strict=True)]
    for column in columns:
        random.shuffle(column)
    return [sum(column) for column in columns]


def read(numbers: list[float], ballots: list[Ballot]) -> Tally:
    return unpack_vote(numbers, ballots[0].step, len(ballots))


def is_refused(numbers: list[float], ballots: list[Ballot]) -> bool:
    try:
        read(numbers, ballots)
    except BrokenVote:
        return True
    except ValueError as error:  # raised only if rounding turns the token count into a non-integer
        assert "which is no integer" in str(error)
    return False


@given(votes(), st.integers())
def test_vote_contains_the_sums_of_all_ballots(ballots: list[Ballot], seed: int) -> None:
    tally = read(all_reduce([pack_vote(b) for b in ballots], seed), ballots)
    vote, sizes = tally.vote, [sum(abs(b.sums[i]) for b in ballots) for i in range(3)]
    for i, value in enumerate((vote.loss_sum, vote.num_tokens, vote.sq_grad_norm)):
        assert math.isclose(
            value, math.fsum(b.sums[i] for b in ballots), rel_tol=0, abs_tol=1e-12 * sizes[i]
        )
    assert vote.num_tokens == sum(b.sums[1] for b in ballots)
    assert vote.num_contributions == len(ballots) and vote.num_nonfinite == 0
    assert vote.num_pause_requests == sum(b.wants_pause for b in ballots)
    assert vote.num_save_requests == sum(b.wants_save for b in ballots)
    assert vote.num_writing == sum(b.is_writing for b in ballots)
    orders = [b.snapshot_order % NUM_ORDERS for b in ballots if b.snapshot_order is not None]
    assert vote.num_snapshots == (len(orders) if len(set(orders)) == 1 else 0)
    assert tally.compute_s == tuple(b.compute_s[b.world_rank] for b in ballots if b.compute_s)


@given(votes(), st.sampled_from([math.nan, math.inf, -math.inf]), st.integers(0, 2))
def test_number_that_is_not_finite_is_counted(
    ballots: list[Ballot], bad: float, index: int
) -> None:
    first = ballots[0]
    sums = tuple(bad if i == index else value for i, value in enumerate(first.sums))
    ballot = Ballot(first.step, 0, sums, compute_s=first.compute_s)  # type: ignore[arg-type]
    vote = read(all_reduce([pack_vote(b) for b in [ballot, *ballots[1:]]]), ballots).vote
    assert vote.num_nonfinite == 1
    assert math.isfinite(vote.loss_sum) and math.isfinite(vote.sq_grad_norm)


@pytest.mark.parametrize("sums", [(1.6e308, 1.0, 1.0), (-1.6e308, 1.0, 1.0), (1.0, 1.0, 1.6e308)])
def test_sum_that_overflows_is_not_finite_on_all_ranks(sums: tuple[float, float, float]) -> None:
    ballots = [Ballot(3, rank, sums) for rank in range(4)]
    vote = read(all_reduce([pack_vote(b) for b in ballots]), ballots).vote
    assert vote.num_nonfinite == 4 and (vote.loss_sum, vote.sq_grad_norm) == (0.0, 0.0)
    assert vote.num_tokens == 4


@given(votes(), st.data())
def test_random_numbers_are_refused(ballots: list[Ballot], data: st.DataObject) -> None:
    length = len(pack_vote(ballots[0]))
    number = st.floats() | st.integers(-9, 9).map(float)
    garbage = data.draw(st.lists(number, min_size=length, max_size=length))
    assert is_refused(garbage, ballots)
    assert is_refused([0.0] * length, ballots)
    assert is_refused([float(len(ballots))] * length, ballots)


@given(votes(min_workers=2), st.data())
def test_vote_without_exactly_one_ballot_of_each_rank_is_refused(
    ballots: list[Ballot], data: st.DataObject
) -> None:
    packed = [pack_vote(b) for b in ballots]
    rank = data.draw(st.integers(0, len(ballots) - 1))
    other = data.draw(st.integers(0, len(ballots) - 1).filter(lambda r: r != rank))
    assert is_refused(packed[rank], ballots), "not reduced"
    assert is_refused(all_reduce(packed[:rank] + packed[rank + 1 :]), ballots), "a rank is missing"
    assert is_refused(all_reduce([*packed, packed[rank]]), ballots), "a rank counts twice"
    replaced = [packed[other if i == rank else i] for i in range(len(packed))]
    assert is_refused(all_reduce(replaced), ballots), "a rank replaces another"


@given(votes(), st.data())
def test_stale_or_shifted_vote_is_refused(ballots: list[Ballot], data: st.DataObject) -> None:
    whole = all_reduce([pack_vote(b) for b in ballots])
    step, shift = ballots[0].step, data.draw(st.integers(1, len(whole) - 1))
    with pytest.raises(BrokenVote):
        unpack_vote(whole, step + 1, len(ballots))
    moved = whole[shift:] + whole[:shift]
    assert moved == whole or is_refused(moved, ballots)
    with pytest.raises(BrokenVote):
        unpack_vote(whole[:-1], step, len(ballots))


@given(votes(min_workers=2), st.data())
def test_vote_with_a_range_that_lacks_a_rank_is_refused(
    ballots: list[Ballot], data: st.DataObject
) -> None:
    """Such a vote is accepted only if its values differ by no more than rounding."""
    packed = [pack_vote(b) for b in ballots]
    whole = all_reduce(packed)
    begin = data.draw(st.integers(0, len(whole) - 1))
    end = data.draw(st.integers(begin + 1, len(whole)))
    missing_ranks = data.draw(st.sets(st.integers(0, len(ballots) - 1), min_size=1))
    partial = all_reduce(
        [p for i, p in enumerate(packed) if i not in missing_ranks] + [[0.0] * len(whole)]
    )
    torn = whole[:begin] + partial[begin:end] + whole[end:]
    assert is_refused(torn, ballots) or is_same(torn, ballots, whole)


@given(votes(), st.data())
def test_vote_with_a_single_wrong_number_is_refused(
    ballots: list[Ballot], data: st.DataObject
) -> None:
    whole = all_reduce([pack_vote(b) for b in ballots])
    index = data.draw(st.integers(0, len(whole) - 1))
    wrong = [*whole]
    wrong[index] = data.draw(st.floats() | st.integers(-9, 9).map(lambda i: whole[index] + i))
    assert is_refused(wrong, ballots) or is_same(wrong, ballots, whole)


def is_same(numbers: list[float], ballots: list[Ballot], whole: list[float]) -> bool:
    """Whether the numbers equal the true vote, except for rounding."""
    tally, true = read(numbers, ballots), read(whole, ballots)
    sizes = [sum(abs(b.sums[i]) for b in ballots) for i in range(3)]
    sums = [(t.vote.loss_sum, t.vote.num_tokens, t.vote.sq_grad_norm) for t in (tally, true)]
    near = [abs(a - b) <= 1e-12 * s for a, b, s in zip(*sums, sizes, strict=True)]
    times = [
        abs(a - b) <= 1e-12 * sum(true.compute_s) * len(ballots)
        for a, b in zip(tally.compute_s, true.compute_s, strict=True)
    ]
    counts = [
        (t.vote.num_nonfinite, t.vote.num_pause_requests, t.vote.num_snapshots)
        for t in (tally, true)
    ]
    saves = [(t.vote.num_save_requests, t.vote.num_writing) for t in (tally, true)]
    return all(near) and all(times) and counts[0] == counts[1] and saves[0] == saves[1]


@pytest.mark.parametrize(("orders", "expected"), [((NUM_ORDERS - 1,), 10_000), ((2, 5, 8), 0)])
def test_only_snapshots_under_one_order_count_together(
    orders: tuple[int, ...], expected: int
) -> None:
    ballots = [Ballot(7, r, NO_SUMS, snapshot_order=orders[r % len(orders)]) for r in range(10_000)]
    assert read(all_reduce([pack_vote(b) for b in ballots]), ballots).vote.num_snapshots == expected
