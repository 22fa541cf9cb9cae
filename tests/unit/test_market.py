"""Spot and on demand: when the controller changes the market of its requests."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest
from test_core import open_run
from test_growth import STEP_S, SteppedRun

from elastic.controller.core import Core
from elastic.geometry.training_job import Job
from elastic.planner.market.exchange import ON_DEMAND, SPOT, Prices, exchange_pays, spot_life_s
from elastic.protocol.commands import Command, StartWorkers, StopWorker
from elastic.protocol.controller_events import ControllerRestarted, WorkerPlaced
from elastic.protocol.controller_state import ControllerState
from elastic.protocol.events import NodeDraining, WorkerLost, WorkerReady
from elastic.protocol.notes import MarketChosen, Warned
from elastic.protocol.phases import Pausing, Running
from elastic.protocol.wire import decode, encode
from pipelines.errors import UserError
from pipelines.observe.history.membership import Membership
from pipelines.run.options import policy_of
from pipelines.settings import TrainSettings
from pipelines.settings.market import MarketSettings

AFTER_S, RETRY_S = 180.0, 600.0


class MarketRun(SteppedRun):
    """A run that remembers the commands of its core, on machines that the test grants."""

    def __init__(
        self, num_workers: int = 2, use: str = "fallback", done_by_s: float = 0.0, **prices: float
    ) -> None:
        policy = {"market_use": use, "on_demand_after_s": AFTER_S, "retry_spot_after_s": RETRY_S}
        policy |= {"done_by_s": done_by_s} | prices
        core = open_run(1, num_workers, start_timeout_s=0.0, **policy)  # type: ignore[arg-type]
        super().__init__(core)
        core.state.job = Job(8, steps=1_000_000)
        self.commands: list[Command] = []

    def deliver(self, *events: object) -> list[Command]:
        commands = super().deliver(*events)  # type: ignore[arg-type]
        self.commands += commands
        return commands

    def grant(self, worker: str, market: str = "") -> None:
        """A machine comes for a worker, which is ready at once."""
        requested = self.core.state.membership.records[worker].market
        node = f"node-{worker}"
        self.deliver(WorkerPlaced(worker, node))
        self.deliver(WorkerReady(worker, node, 1, digest="same", market=market or requested))

    def train(self, seconds: float) -> list[Command]:
        """Commit steps for so long; return what the core ordered meanwhile."""
        first, end = len(self.commands), self.now + seconds
        while self.now < end:
            if isinstance(self.core.state.phase, Pausing):
                self.pause()
                self.form()
            self.commit()
            woken = self.core.next_deadline()
            assert woken is None or woken > self.now, "a deadline without effect wakes the core"
        return self.commands[first:]

    def replace(self, worker: str) -> list[StartWorkers]:
        """Lose a member; return the starts of others in its place."""
        first = len(self.commands)
        self.lose(worker)
        self.form()
        return started(self.commands[first:])

    def pending(self) -> list[str]:
        return list(self.core.state.market.pending)

    def end(self, worker: str) -> None:
        """The process of a stopped or drained worker ends."""
        self.deliver(WorkerLost(worker, "stopped"))

    def markets(self) -> dict[str, str]:
        """The market of each member's machine."""
        state = self.core.state
        return {w: state.membership.records[w].market for w in state.live.members()}


def chosen(commands: list[Command]) -> list[tuple[str, int]]:
    return [(c.market, c.num_workers) for c in commands if isinstance(c, MarketChosen)]


def started(commands: list[Command]) -> list[StartWorkers]:
    return [command for command in commands if isinstance(command, StartWorkers)]


def fallen_back(num_workers: int = 2) -> MarketRun:
    """One worker on spot; the others have come on demand, because no spot machine came."""
    run = MarketRun(num_workers)
    run.grant("w0")
    run.form()
    run.train(AFTER_S)
    for worker in run.pending():
        run.grant(worker)
    run.train(5.0)
    assert len(run.core.state.live.members()) == num_workers
    return run


def test_any_machine_is_requested_by_default() -> None:
    run = SteppedRun(open_run(1, 2, start_timeout_s=0.0))
    assert run.core.state.market.requested == "" and not run.core.state.market.pending
    assert run.core.state.membership.records.keys() == {"w0", "w1"}


@pytest.mark.parametrize(("use", "market"), [("spot", SPOT), ("on_demand", ON_DEMAND)])
def test_one_market_is_never_left(use: str, market: str) -> None:
    run = MarketRun(2, use)
    run.grant("w0")
    run.form()
    assert not chosen(run.train(10 * AFTER_S))
    assert run.markets() == {"w0": market} and run.pending() == ["w1"]


def test_pending_spot_requests_are_made_again_on_demand() -> None:
    run = MarketRun(3)
    run.grant("w0")
    run.form()
    assert not chosen(run.train(AFTER_S - 10.0))
    commands = run.train(10.0)
    assert chosen(commands) == [(ON_DEMAND, 2)]
    stopped = {c.worker for c in commands if isinstance(c, StopWorker)}
    [start] = started(commands)
    assert stopped == {"w1", "w2"} and start.market == ON_DEMAND and len(start.workers) == 2
    for worker in stopped:
        run.end(worker)
    for worker in start.workers:
        run.grant(worker)
    run.train(5.0)
    assert sorted(run.markets().values()) == [ON_DEMAND, ON_DEMAND, SPOT]
    assert run.core.state.membership.num_start_failures == 0


def test_worker_that_warms_up_for_long_is_not_withdrawn() -> None:
    run = MarketRun(2)
    run.grant("w0")
    run.form()
    run.deliver(WorkerPlaced("w1", "node-w1"))
    assert not chosen(run.train(10 * AFTER_S))


def test_worker_lost_while_spot_is_short_is_replaced_on_demand() -> None:
    run = fallen_back()
    assert [start.market for start in run.replace("w0")] == [ON_DEMAND]


def test_worker_lost_after_the_time_is_replaced_on_spot() -> None:
    run = fallen_back()
    run.core.state.market.exchange_at = None  # an exchange would come first
    run.train(RETRY_S)
    assert [start.market for start in run.replace("w0")] == [SPOT]


def test_cloud_that_refuses_both_is_asked_in_turn_and_ever_more_rarely() -> None:
    run = MarketRun(2)
    run.grant("w0")
    run.form()
    commands = run.train(3 * 3600.0)
    markets = [market for market, _ in chosen(commands)]
    assert markets == [ON_DEMAND, SPOT] * (len(markets) // 2) + [ON_DEMAND] * (len(markets) % 2)
    assert 4 <= len(markets) <= 8, "the patience doubles from 180 s to an hour"
    assert len(run.core.state.membership.records) - len(run.core.state.membership.draining) == 2
    causes = [command.cause for command in commands if isinstance(command, MarketChosen)]
    assert causes[0] == "no spot machine came for 180 s"
    assert causes[2] == "no spot machine came for 720 s"
    hint = "(a node type needs the label ray.io/market-type: on-demand)"
    assert causes[1] == f"no on-demand machine came for 180 s {hint}"


def test_on_demand_worker_is_exchanged_without_a_repeated_step() -> None:
    run = fallen_back(3)
    commands = run.train(RETRY_S)
    assert chosen(commands) == [(SPOT, 2)]
    [start] = started(commands)
    assert start.market == SPOT and len(run.core.state.membership.records) == 5 + 2
    step, [first, second] = run.core.state.committed_step, start.workers
    run.deliver(WorkerPlaced(first, "node-a"))
    run.grant(second)
    assert not chosen(run.train(30.0)), "the other warms up: one pause exchanges both"
    run.grant(first)
    run.train(5.0)
    assert set(run.markets().values()) == {SPOT} and len(run.markets()) == 3
    assert run.core.state.committed_step > step and not run.core.state.rollbacks.number
    assert isinstance(run.core.state.phase, Running)


def test_exchange_without_spot_machines_leaves_the_run_as_it_is() -> None:
    run = fallen_back()
    members = run.markets()
    run.train(RETRY_S)
    [extra] = run.core.state.market.extra
    commands = run.train(AFTER_S + 1.0)
    assert chosen(commands) == [(ON_DEMAND, 0)]
    assert [c.worker for c in commands if isinstance(c, StopWorker)] == [extra]
    run.end(extra)
    assert run.markets() == members and not started(run.train(RETRY_S))
    assert chosen(run.train(RETRY_S + 1.0)) == [(SPOT, 1)], "the second attempt waits twice as long"


def test_extra_worker_replaces_a_lost_one() -> None:
    run = fallen_back()
    run.train(RETRY_S)
    [extra] = run.core.state.market.extra
    run.deliver(WorkerPlaced(extra, "node-x"))
    assert not run.replace("w0") and not run.core.state.market.extra
    run.grant(extra)
    run.train(5.0)
    assert extra in run.markets()


def test_extra_workers_without_a_counterpart_are_stopped() -> None:
    run = fallen_back()
    run.train(RETRY_S)
    [extra] = run.core.state.market.extra
    on_demand = next(w for w, market in run.markets().items() if market == ON_DEMAND)
    run.core.state.membership.records[on_demand].market = SPOT
    commands = run.train(1.0)
    assert extra in [c.worker for c in commands if isinstance(c, StopWorker)]
    assert not run.core.state.market.extra


def test_lives_of_spot_workers_decide_whether_an_exchange_pays() -> None:
    run = fallen_back()
    run.core.state.growth.pauses_s = [30.0]
    run.core.state.market.num_spot_lost, run.core.state.market.spot_worker_s = 100, 1000.0
    assert not chosen(run.train(RETRY_S + 1.0)), "spot workers live for about 20 s"


def test_announced_end_counts_as_a_loss_and_a_planned_one_does_not() -> None:
    run = fallen_back()
    run.deliver(NodeDraining("node-w0", run.now + 30.0, "a test"))
    run.train(5.0)
    run.end("w0")
    assert run.core.state.market.num_spot_lost == 1
    assert run.core.state.market.spot_worker_s > AFTER_S


def test_restarted_controller_knows_what_is_pending_and_gives_it_its_time() -> None:
    run = MarketRun(2)
    run.grant("w0")
    run.form()
    run.train(100.0)
    state = decode(ControllerState, encode(run.core.state, is_sparse=True))
    stopped_at, run.core = run.now, Core(state)
    run.now += 1000.0
    run.deliver(ControllerRestarted(2, stopped_at))
    assert not chosen(run.commands) and run.pending() == ["w1"]
    assert not chosen(run.train(70.0)), "the absence does not count"
    assert chosen(run.train(20.0)) == [(ON_DEMAND, 1)]


def test_missing_label_is_reported_once_with_what_to_set() -> None:
    run = MarketRun(2)
    for worker in ("w0", "w1"):
        run.deliver(WorkerReady(worker, f"node-{worker}", 1, digest="same"))
    [warned] = [c for c in run.commands if isinstance(c, Warned)]
    assert warned.text == (
        "node node-w0 has no label ray.io/market-type, so it counts as the spot machine that was "
        "requested: add `labels: {ray.io/market-type: spot}` or `on-demand` to its node type"
    )


def test_thousand_refused_workers_take_few_journal_lines() -> None:
    run = MarketRun(1000)
    run.grant("w0")
    run.form()
    commands: list[Command] = []
    while run.now < 5 * 3600.0:
        run.now += 30.0  # less than the timeout of a hang
        commands += run.train(STEP_S)
        for worker in run.core.state.membership.draining.copy():
            run.end(worker)
    assert 5 <= len(chosen(commands)) <= 12
    assert len(run.core.state.membership.records) == 1000 and len(run.pending()) == 999


def test_events_of_a_change_say_why_and_count_no_loss() -> None:
    membership = Membership()
    lines: list[dict[str, object]] = [
        {"event": "RunOpened"},
        {"command": "StartWorkers", "workers": ["w0", "w1"]},
        {
            "command": "MarketChosen",
            "market": ON_DEMAND,
            "num_workers": 1,
            "cause": "no spot machine came for 180 s",
            "withdrawn": ["w1"],
        },
        {"command": "StopWorker", "worker": "w1", "cause": "no spot machine came for 180 s"},
        {"event": "WorkerLost", "worker": "w1", "cause": "stopped"},
    ]
    for line in lines:
        membership.take({"time": 1.0, "generation": 0, **line})
    texts = [event.text for event in membership.run_events]
    assert texts == ["asked for 1 on-demand machine: no spot machine came for 180 s"]
    assert membership.num_lost == 0 and membership.starting == {"w0"}


@pytest.mark.parametrize(
    ("life_s", "left_s", "pause_s", "pays"),
    [
        (inf, inf, 1.0, True),
        (3600.0, inf, 1.0, True),
        (60.0, inf, 30.0, False),
        (inf, 50.0, 1.0, False),
        (inf, 600.0, 1.0, True),
    ],
)
def test_exchange_pays_if_it_saves_more_than_its_pauses(
    life_s: float, left_s: float, pause_s: float, pays: bool
) -> None:
    prices = Prices.known(0.0, 0.0)
    assert prices == Prices(1.0, 3.0)
    answer = exchange_pays(
        4, 8, prices, life_s=life_s, left_s=left_s, pause_s=pause_s, start_s=100.0
    )
    assert answer == pays


def test_exchange_for_dearer_machines_never_pays() -> None:
    costs = {"life_s": inf, "left_s": inf, "pause_s": 0.0, "start_s": 0.0}
    assert not exchange_pays(1, 2, Prices(3.0, 3.0), **costs)


def test_expected_life_counts_the_living() -> None:
    assert spot_life_s(0, 100.0) == inf
    assert spot_life_s(4, 100.0) == 25.0


PRICES = {"spot_price": 1.0, "on_demand_price": 3.0}


def price_of(run: MarketRun) -> float:
    """What the run pays an hour if each worker that it has requested has a machine."""
    records = run.core.state.membership.records.values()
    return sum(3.0 if record.market == ON_DEMAND else 1.0 for record in records)


def market_warnings(commands: list[Command]) -> list[Warned]:
    return [c for c in commands if isinstance(c, Warned) and c.kind == "market"]


def test_no_worker_is_requested_above_the_highest_price() -> None:
    run = MarketRun(6, max_price_per_hour=4.5, **PRICES)
    assert run.pending() == ["w0", "w1", "w2", "w3"] and price_of(run) == 4
    assert run.core.state.market.num_withheld == 2
    run.grant("w0")
    run.form()
    run.train(1.0)
    [stopped] = [c.withdrawn for c in run.train(AFTER_S) if isinstance(c, MarketChosen)]
    for worker in stopped:
        run.end(worker)
    assert run.core.state.market.requested == ON_DEMAND
    run.train(5.0)
    assert len(run.pending()) == 1 and price_of(run) == 4  # one on spot, one on demand
    assert not market_warnings(run.commands)
    run.core.state.market.num_withheld = 0
    [warned] = market_warnings(run.train(1.0))
    assert "4 more workers would cost more than market.max_price_per_hour=4.5" in warned.text


def test_on_demand_workers_are_exchanged_as_far_as_the_highest_price_allows() -> None:
    run = MarketRun(3, "on_demand", max_price_per_hour=10.0, **PRICES)
    run.grant("w0")
    run.form()
    for worker in run.pending():
        run.grant(worker)
    run.train(5.0)
    state = run.core.state
    state.policy = replace(state.policy, market_use="fallback")
    state.market.requested, state.market.exchange_at = SPOT, run.now
    run.train(5.0)
    assert len(state.market.extra) == 1 and price_of(run) == 10


def test_price_that_the_smallest_run_exceeds_is_refused() -> None:
    market = MarketSettings(use="fallback", max_price_per_hour=3.5, **PRICES)
    settings = TrainSettings(market=market)
    assert policy_of(settings, 3, 8, "run").max_price_per_hour == 3.5
    with pytest.raises(UserError, match="the 4 workers that the run needs at least cost 4 an hour"):
        policy_of(settings, 4, 8, "run")
    with pytest.raises(ValueError, match="give spot_price and on_demand_price, too"):
        MarketSettings(use="spot", max_price_per_hour=3.5)
    with pytest.raises(ValueError, match="set use to spot, on_demand or fallback"):
        MarketSettings(max_price_per_hour=3.5, **PRICES)
