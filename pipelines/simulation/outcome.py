"""What a simulated run has achieved, in the numbers that its table and its JSON file show."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from statistics import median

from actors.simulation.simulation import SimulatedRun, SimulationResult
from elastic.simulation.restarts import MEASURED, RestartLimits, run_with_restarts
from elastic.simulation.step_times import LayoutTimes
from elastic.simulation.trace import Availability

THIS_SYSTEM = "this controller"


@dataclass(frozen=True, slots=True)
class SystemOutcome:
    """One system on the trace; times are in seconds, `cost` in the currency of the prices.

    `goodput` is the share of the time in steps that stay committed. `use` is the same in
    worker-seconds, of those that the available nodes offer. Both are of the time up to `end_s`,
    which is the end of the trace, or `finish_s` if all steps were done before. With a market,
    `cost` and `use` are of the machines that the run used, `spot_h` and `on_demand_h` their hours.
    """

    system: str
    goodput: float
    use: float
    steps: int
    redone: int
    pauses_s: tuple[float, ...]
    end_s: float
    finish_s: float | None = None
    cost: float | None = None
    spot_h: float | None = None
    on_demand_h: float | None = None

    @property
    def median_pause_s(self) -> float:
        return median(self.pauses_s) if self.pauses_s else 0.0

    @property
    def p99_pause_s(self) -> float:
        """The pause that 99 % of the pauses do not exceed."""
        return sorted(self.pauses_s)[-(-99 * len(self.pauses_s) // 100) - 1] if self.pauses_s else 0


def outcome_of(
    run: SimulatedRun, result: SimulationResult, price: float | None, system: str = THIS_SYSTEM
) -> SystemOutcome:
    """The outcome of the real controller, under this name."""
    ledger, end_s, policy = result.ledger, result.end_s, run.policy
    offered = run.trace.worker_s(run.workers_per_node, policy.max_workers, end_s)
    cost, hours = cost_of_nodes(run.trace, end_s, price), None
    if chooses_market(run):
        offered = run.workers_per_node * (result.spot_s + result.on_demand_s)
        hours = result.spot_s / 3600, result.on_demand_s / 3600
        per_hour = hours[0] * policy.spot_price + hours[1] * policy.on_demand_price
        cost = run.workers_per_node * per_hour or None
    return SystemOutcome(
        system,
        ledger.committed_s / end_s,
        ledger.worker_s / offered if offered else 0.0,
        ledger.step,
        ledger.num_redone,
        tuple(ledger.pauses_s),
        end_s,
        end_s if result.outcome.outcome == "completed" else None,
        cost,
        *(hours or ()),
    )


def chooses_market(run: SimulatedRun) -> bool:
    """Whether the run requests machines by their market."""
    return run.policy.market_use != "any"


def restart_outcomes(run: SimulatedRun, price: float | None) -> list[SystemOutcome]:
    """The outcomes of systems that restart all workers, on the same trace."""
    policy, job, per_node = run.policy, run.job, run.workers_per_node
    times = LayoutTimes(job, run.target_layout, policy.max_workers, per_node, run.costs.step_s)
    limits = RestartLimits(
        policy.min_workers, policy.max_workers, per_node, job.steps, cache(times.with_workers)
    )
    outcomes = []
    for system in MEASURED:
        done = run_with_restarts(system, run.trace, run.costs, limits)
        end_s = done.finish_s or run.trace.end_s
        offered = run.trace.worker_s(per_node, policy.max_workers, end_s)
        outcomes.append(
            SystemOutcome(
                system.name,
                done.committed_s / end_s,
                done.worker_s / offered if offered else 0.0,
                done.steps,
                done.num_redone,
                tuple(done.pauses_s),
                end_s,
                done.finish_s,
                cost_of_nodes(run.trace, end_s, price),
            )
        )
    return outcomes


def cost_of_nodes(trace: Availability, until_s: float, price: float | None) -> float | None:
    """The price of all nodes; one price for all replaces those of the trace."""
    if price is None:
        return trace.cost(until_s)
    return price * trace.worker_s(1, trace.peak, until_s) / 3600
