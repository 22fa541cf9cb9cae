"""Market: whether workers are requested on spot or on on-demand machines.

With `market.use=fallback` workers are requested on spot machines. If a request stays pending for
`on_demand_after_s`, spot counts as short for `retry_spot_after_s`: pending requests are withdrawn
and made again on demand, and so are those for workers lost meanwhile. If no on-demand machine comes
either, spot is requested again. Each change without a machine lengthens the patience with the next
request, up to `LONGEST_S`, in case machines start more slowly than the user expects. Each refusal
of spot doubles the time until the next attempt.

Then the run tries to exchange its on-demand workers, if that pays. It requests as many spot workers
beyond its wanted number. Once they are warm, on-demand workers drain in their favour at a step
boundary. If no spot machine comes, the on-demand workers have trained on, and spot is short again.
An extra worker replaces a worker that is lost meanwhile.

With `market.max_price_per_hour` no worker is requested that would make all together cost more.
Those that are missing are requested when a cheaper market is, or when others have left.

With `market.done_by` on-demand machines are used only while the run needs them to be done in time
(`elastic.planner.market.deadline`). A run that is ahead lets its on-demand workers drain.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf
from statistics import mean, median

from elastic.duties.bandwidth import capacity_now, known_job
from elastic.duties.membership import (
    drain_for_good,
    num_missing,
    num_within_price,
    start_workers,
)
from elastic.geometry.errors import Infeasible
from elastic.geometry.layout import Layout
from elastic.planner.layout_choice import plan_layout
from elastic.planner.market.deadline import Progress
from elastic.planner.market.exchange import ON_DEMAND, SPOT, Prices, exchange_pays, spot_life_s
from elastic.planner.models.step_cost import cost_of
from elastic.protocol.commands import Command, StopWorker
from elastic.protocol.controller_events import WorkerPlaced
from elastic.protocol.controller_state import ControllerState
from elastic.protocol.notes import MarketChosen, Warned
from elastic.protocol.phases import Running
from elastic.protocol.policy import backoff_s

FALLBACK = "fallback"
MARKETS = {"spot": SPOT, "on_demand": ON_DEMAND, FALLBACK: SPOT}
"""By setting `market.use`, the market of the first requests; none for `any`."""
LONGEST_S = 3600.0
EXCHANGE_WAIT_S = 60.0
"""How long warm spot workers wait for others that warm up, so that one pause exchanges all."""
FORGET_LIVES_AFTER = 32
"""After so many losses the lives of earlier spot workers count half."""
USUAL_PAUSE_S = 1.0
USUAL_START_S = 60.0
ROUNDING_S = 1.0
LABEL = "ray.io/market-type"


def on_placed(state: ControllerState, event: WorkerPlaced) -> list[Command]:
    """A requested worker has got a machine."""
    record = state.membership.records.get(event.worker)
    if record is not None and state.market.pending.pop(event.worker, None) is not None:
        state.market.num_changes = 0
        if record.market == SPOT:
            state.market.num_refusals = 0
    return []


def check_label(state: ControllerState, worker: str, label: str) -> list[Command]:
    """Warn once about a machine whose label does not name its market."""
    record = state.membership.records.get(worker)
    if state.policy.market_use not in MARKETS or record is None or label or state.market.has_warned:
        return []
    state.market.has_warned = True
    text = (
        f"node {record.node} has no label {LABEL}, so it counts as the {record.market} machine "
        f"that was requested: add `labels: {{{LABEL}: spot}}` or `on-demand` to its node type"
    )
    return [Warned(state.generation, state.committed_step, "market", text)]


def note_lost(state: ControllerState, now: float, worker: str) -> None:
    """Note how long a spot worker lived; call this before the worker is removed."""
    record, market = state.membership.records.get(worker), state.market
    if record is None or record.market != SPOT or not record.is_ready:
        return
    is_planned = worker in state.membership.draining
    market.spot_worker_s += now - record.since
    market.num_spot_lost += not is_planned or record.node in state.membership.node_drains
    if market.num_spot_lost > FORGET_LIVES_AFTER:
        market.num_spot_lost, market.spot_worker_s = (
            market.num_spot_lost // 2,
            market.spot_worker_s / 2,
        )


def market_deadline(state: ControllerState) -> float:
    """When the next pending request counts as refused, or on-demand workers may be exchanged."""
    market, draining = state.market, state.membership.draining
    if state.policy.market_use != FALLBACK or state.ending:
        return inf
    times, progress = [market.short_until or inf], _progress(state, market.opened_at)
    if progress is not None and not market.is_behind:
        times.append(market.opened_at + progress.behind_after_s() + ROUNDING_S)
    if progress is not None and market.has_slack:
        times.append(market.opened_at + progress.slack_until_s() + ROUNDING_S)
    if market.has_slack and (progress is None or market.is_behind):
        times += [
            since + _patience_s(state, state.membership.records[worker].market)
            for worker, since in market.pending.items()
            if worker not in draining
        ]
        if _may_exchange(state):
            times.append(_swap_deadline(state) if market.extra else market.exchange_at or inf)
    return min(times)


def follow_up(state: ControllerState, now: float) -> list[Command]:
    """Change the market of pending requests, and exchange workers, when it is time."""
    market = state.market
    if state.policy.market_use not in MARKETS or state.ending:
        return []
    if state.policy.market_use != FALLBACK:
        market.requested = MARKETS[state.policy.market_use]
        return []
    market.extra -= state.membership.draining
    for worker in _by_progress(state)[: num_missing(state)]:
        market.extra.discard(worker)
    progress = _progress(state, now)
    if progress is not None:
        market.has_slack = not progress.has_no_slack
        market.is_behind = progress.needs_on_demand(market.is_behind)
        if not market.is_behind:
            return _leave_on_demand(state, progress)
    commands = _fall_back(state, now, progress)
    if market.short_until is not None and now >= market.short_until:
        market.short_until = None
    market.requested = SPOT if market.short_until is None else ON_DEMAND
    if not market.has_slack:
        market.requested = ON_DEMAND
        market.extra.clear()
    elif _may_exchange(state):
        commands += _swap(state, now) if market.extra else _request_extra(state, now)
    return commands


def _may_exchange(state: ControllerState) -> bool:
    return isinstance(state.phase, Running) and state.phase.num_commits > 0


def _by_progress(state: ControllerState) -> list[str]:
    """The extra workers: warm ones first, then those that warm up."""
    market, warm = state.market, state.membership.warm
    return sorted(market.extra, key=lambda w: (w in market.pending, w not in warm, w))


def _patience_s(state: ControllerState, kind: str) -> float:
    """How long a request may be pending. The patience with on demand grows more slowly: a run that
    gets neither waits for spot most of the time, which is cheaper and comes again more often."""
    first_s, num_changes = state.policy.on_demand_after_s, state.market.num_changes
    num_doublings = num_changes // 2 if kind == ON_DEMAND else num_changes
    return backoff_s(first_s, num_doublings + 1, max(first_s, LONGEST_S))


def _progress(state: ControllerState, now: float) -> Progress | None:
    """How far the run is with regard to `market.done_by`; None without it."""
    market, policy, steps = state.market, state.policy, state.job.steps
    if not policy.done_by_s and not policy.done_by_at:
        return None
    starts_s, pauses_s = state.membership.recent_start_s, state.growth.pauses_s
    return Progress(
        state.committed_step / steps,
        now - market.opened_at,
        policy.done_by_s or policy.done_by_at - market.opened_at,
        (steps - state.committed_step) * _full_step_s(state),
        (median(starts_s) if starts_s else USUAL_START_S)
        + (median(pauses_s) if pauses_s else USUAL_PAUSE_S),
    )


def _full_step_s(state: ControllerState) -> float:
    """The time of a step with all workers; 0 if not known."""
    layout = state.steps.measured.layout
    if layout is None:
        return 0.0
    if state.market.speedup is None or state.market.speedup[0] != layout:
        state.market.speedup = layout, _speedup(state, layout)
    return state.steps.measured.median_s() / state.market.speedup[1]


def _speedup(state: ControllerState, layout: Layout) -> float:
    job, capacity = known_job(state), capacity_now(state)
    whole = replace(capacity, num_workers=max(capacity.num_workers, state.policy.max_workers))
    choice = plan_layout(layout, whole, state.layouts.target, job, snapshots_cover=True)
    if isinstance(choice, Infeasible):
        return 1.0
    return cost_of(layout, job, capacity) / cost_of(choice.layout, job, whole)


def _leave_on_demand(state: ControllerState, progress: Progress) -> list[Command]:
    """The run is ahead: use spot machines alone, as far as the minimum of workers allows."""
    market, membership = state.market, state.membership
    market.requested, market.short_until, market.exchange_at = SPOT, None, None
    market.extra.clear()
    cause = f"the run is {progress.lead_s / 60:.0f} min ahead of its time"
    pending = [w for w in market.pending if membership.records[w].market == ON_DEMAND]
    commands = _replace(state, SPOT, pending, cause) if pending else []
    if not _may_exchange(state):
        return commands
    num_spare = max(0, membership.num_staying() - state.policy.min_workers)
    leaving = tuple(_on_demand_workers(state)[:num_spare])
    if leaving:
        commands.append(MarketChosen(SPOT, 0, cause, leaving))
    for worker in leaving:
        commands += drain_for_good(state, worker, cause)
    return commands


def _fall_back(state: ControllerState, now: float, progress: Progress | None) -> list[Command]:
    """Withdraw the requests of a market that has none for too long, for the sake of the other."""
    market, policy = state.market, state.policy
    if progress is not None and progress.has_no_slack:
        spot = [w for w in market.pending if state.membership.records[w].market == SPOT]
        cause = "no slack is left until the time by which the run is to be done"
        return _replace(state, ON_DEMAND, spot, cause) if spot else []
    spot = _refused(state, now, SPOT)
    if spot:
        market.num_refusals += 1
        retry_s = policy.retry_spot_after_s
        retry_s = backoff_s(retry_s, market.num_refusals, max(retry_s, LONGEST_S))
        market.short_until = market.exchange_at = now + retry_s
        cause = f"no spot machine came for {_patience_s(state, SPOT):g} s"
        return _replace(state, ON_DEMAND, spot, cause)
    on_demand = _refused(state, now, ON_DEMAND)
    if on_demand:
        market.short_until = None
        hint = f"(a node type needs the label {LABEL}: on-demand)"
        cause = f"no on-demand machine came for {_patience_s(state, ON_DEMAND):g} s {hint}"
        return _replace(state, SPOT, on_demand, cause)
    return []


def _refused(state: ControllerState, now: float, kind: str) -> list[str]:
    """All pending workers of a market, if one of them has been pending for too long."""
    records, draining = state.membership.records, state.membership.draining
    pending = [
        worker
        for worker in state.market.pending
        if records[worker].market == kind and worker not in draining
    ]
    first = min((state.market.pending[worker] for worker in pending), default=inf)
    return pending if now >= first + _patience_s(state, kind) else []


def _replace(
    state: ControllerState, kind: str, withdrawn: Sequence[str], cause: str
) -> list[Command]:
    """Withdraw pending requests; `start_missing` makes them again on another market."""
    market = state.market
    num_workers = len(set(withdrawn) - market.extra)
    market.num_changes += num_workers > 0
    market.extra.difference_update(withdrawn)
    state.membership.draining.update(withdrawn)
    for worker in withdrawn:
        del market.pending[worker]
    chosen = MarketChosen(kind, num_workers, cause, tuple(withdrawn))
    return [chosen, *(StopWorker(worker, cause) for worker in withdrawn)]


def _on_demand_workers(state: ControllerState) -> list[str]:
    membership = state.membership
    return [
        worker
        for worker in sorted(membership.warm - membership.draining)
        if membership.records[worker].market == ON_DEMAND
    ]


def _request_extra(state: ControllerState, now: float) -> list[Command]:
    """Request spot workers in exchange for on-demand workers, if it is time and pays."""
    market = state.market
    if market.exchange_at is None or now < market.exchange_at or market.short_until is not None:
        return []
    on_demand = _on_demand_workers(state)
    market.exchange_at = now + state.policy.retry_spot_after_s if on_demand else None
    if not on_demand or market.pending or num_missing(state):
        return []
    number = int(min(len(on_demand), num_within_price(state)))
    if not number or not _pays(state, now, number):
        return []
    started = start_workers(state, now, number)
    market.extra.update(started.workers)
    cause = "on-demand workers are exchanged when spot machines come"
    return [MarketChosen(SPOT, number, cause), started]


def _pays(state: ControllerState, now: float, num_exchanged: int) -> bool:
    market, membership, policy = state.market, state.membership, state.policy
    alive = [record for record in membership.records.values() if record.market == SPOT]
    alive_s = sum(now - record.since for record in alive if record.is_ready)
    left = state.job.steps - state.committed_step
    return exchange_pays(
        num_exchanged,
        len(state.live.members()),
        Prices.known(policy.spot_price, policy.on_demand_price),
        life_s=spot_life_s(market.num_spot_lost, market.spot_worker_s + alive_s),
        left_s=left * state.steps.measured.median_s() if state.steps.measured.median_s() else inf,
        pause_s=median(state.growth.pauses_s) if state.growth.pauses_s else USUAL_PAUSE_S,
        start_s=mean(membership.recent_start_s) if membership.recent_start_s else USUAL_START_S,
    )


def _swap_deadline(state: ControllerState) -> float:
    """Until when warm extra workers wait for those that warm up."""
    records = state.membership.records
    ready = [records[worker].since for worker in state.market.extra & state.membership.warm]
    return min(ready, default=inf) + EXCHANGE_WAIT_S


def _swap(state: ControllerState, now: float) -> list[Command]:
    """Let on-demand workers drain for warm extra workers, and release those without a
    counterpart."""
    market, warm = state.market, state.membership.warm
    on_demand = _on_demand_workers(state)
    kept = _by_progress(state)[: len(on_demand)]
    commands = _release(state, market.extra.difference(kept))
    ready = [worker for worker in kept if worker in warm]
    is_warming = any(worker not in warm and worker not in market.pending for worker in kept)
    if not ready or (is_warming and now < _swap_deadline(state)):
        return commands
    leaving = tuple(on_demand[: len(ready)])
    market.extra.difference_update(ready)
    market.exchange_at = now + state.policy.retry_spot_after_s
    cause = "spot machines have come"
    commands.append(MarketChosen(SPOT, len(ready), cause, leaving))
    for worker in leaving:
        commands += drain_for_good(state, worker, cause)
    return commands


def _release(state: ControllerState, workers: set[str]) -> list[Command]:
    """Stop extra workers whose on-demand workers are gone."""
    state.market.extra -= workers
    state.membership.draining |= workers
    for worker in workers:
        state.market.pending.pop(worker, None)
    cause = "no on-demand worker is left to be exchanged"
    return [StopWorker(worker, cause) for worker in sorted(workers)]
