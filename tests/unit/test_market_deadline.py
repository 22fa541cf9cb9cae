"""A run that is to be done by a time uses on-demand machines as far as it needs them."""

from __future__ import annotations

import pytest
from pydantic import ValidationError
from test_market import AFTER_S, RETRY_S, MarketRun, chosen

from elastic.geometry.training_job import Job
from elastic.planner.market.deadline import Progress
from elastic.planner.market.exchange import ON_DEMAND, SPOT
from elastic.protocol.notes import MarketChosen
from pipelines.settings.market import MarketSettings


def with_steps(num_steps: int, done_by_s: float) -> MarketRun:
    """One of two workers on spot; the other finds no spot machine."""
    run = MarketRun(2, done_by_s=done_by_s)
    run.core.state.job = Job(8, steps=num_steps)
    run.grant("w0")
    run.form()
    return run


def test_run_ahead_of_its_time_uses_spot_machines_alone() -> None:
    run = with_steps(10_000, done_by_s=10_000.0)  # it commits two steps a second
    assert not chosen(run.train(1000.0))
    assert run.pending() == ["w1"] and run.core.state.market.requested == SPOT


def test_run_behind_its_time_gets_on_demand_workers_until_it_is_ahead() -> None:
    run = with_steps(10_000, done_by_s=8000.0)
    run.now += 50.0  # as if nothing had been done meanwhile
    run.core.state.market.opened_at -= 400.0
    [(market, number)] = chosen(run.train(AFTER_S + 1.0))
    assert (market, number) == (ON_DEMAND, 1)
    [worker] = run.pending()
    run.grant(worker)
    commands = run.train(2000.0)
    leaving = [c.withdrawn for c in commands if isinstance(c, MarketChosen) and c.withdrawn]
    assert leaving == [(worker,)]
    assert worker not in run.markets() and run.core.state.market.requested == SPOT


def test_run_without_slack_stays_on_demand() -> None:
    run = with_steps(10_000, done_by_s=2501.0)  # with two workers the steps take 2,500 s
    assert chosen(run.commands) == [(ON_DEMAND, 1)], "at once: there is no time to wait for spot"
    run.grant(*run.pending())
    assert not chosen(run.train(RETRY_S + AFTER_S)) and set(run.markets().values()) == {
        SPOT,
        ON_DEMAND,
    }


@pytest.mark.parametrize(
    ("share", "elapsed_s", "left_s", "is_behind", "needs"),
    [
        (0.5, 500.0, 100.0, False, False),
        (0.5, 505.0, 100.0, False, False),
        (0.5, 520.0, 100.0, False, True),
        (0.5, 500.0, 100.0, True, True),
        (0.53, 500.0, 100.0, True, False),
        (0.9, 100.0, 890.0, False, True),
    ],
)
def test_uniform_progress(
    share: float, elapsed_s: float, left_s: float, is_behind: bool, needs: bool
) -> None:
    """Of 1,000 s; a change costs 10 s."""
    progress = Progress(share, elapsed_s, 1000.0, left_s, 10.0)
    assert progress.needs_on_demand(is_behind) == needs


@pytest.mark.parametrize(
    ("text", "seconds"), [("90min", 5400.0), ("12h", 43200.0), ("1.5d", 129600.0), ("", 0.0)]
)
def test_done_by_is_a_duration(text: str, seconds: float) -> None:
    settings = MarketSettings(done_by=text)
    assert (settings.done_by_s, settings.done_by_at) == (seconds, 0.0)


def test_done_by_is_a_time() -> None:
    settings = MarketSettings(done_by="2026-12-01T08:00+00:00")
    assert (settings.done_by_s, settings.done_by_at) == (0.0, 1796112000.0)


def test_unreadable_done_by_is_refused_in_one_line() -> None:
    with pytest.raises(ValidationError, match="write a duration such as 90min, 12h or 3d"):
        MarketSettings(done_by="soon")
