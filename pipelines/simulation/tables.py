"""The printed table and the JSON file of a simulation."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from actors.simulation.simulation import SimulatedRun
from pipelines.errors import UserError
from pipelines.observe.history.formatting import counted, duration, quantity
from pipelines.simulation.outcome import SystemOutcome


def print_results(
    console: Console, name: str, run: SimulatedRun, outcomes: Sequence[SystemOutcome]
) -> None:
    """Print the trace and the costs, then a table with one row for each system."""
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="dim", no_wrap=True)
    facts.add_column()
    for label, value in facts_of(name, run):
        facts.add_row(label, Text(value))
    console.print(facts)
    table = Table(box=SIMPLE_HEAD, collapse_padding=True)
    table.add_column("system", overflow="fold")
    columns = ["goodput", "capacity used", "steps", "redone", "pauses", "median", "p99"]
    columns += ["finished"] * any(outcome.finish_s is not None for outcome in outcomes)
    columns += ["spot h", "on-demand h"] * any(outcome.spot_h is not None for outcome in outcomes)
    columns += ["cost"] * any(outcome.cost is not None for outcome in outcomes)
    for column in columns:
        table.add_column(column, justify="right")
    for outcome in outcomes:
        system = outcome.system.removeprefix("market.")  # which leaves room for the columns
        table.add_row(system, *(_cell(column, outcome) for column in columns))
    console.print(table)


def facts_of(name: str, run: SimulatedRun) -> list[tuple[str, str]]:
    """What was simulated, as labels and texts."""
    trace, costs, policy, layout = run.trace, run.costs, run.policy, run.layout
    mean = trace.worker_s(1, trace.peak, trace.end_s) / trace.end_s
    return [
        (
            "trace",
            f"{name}: {duration(trace.end_s)}, {trace.num_changes:,} changes, "
            f"{counted(trace.num_removed, 'node')} lost; {mean:.1f} nodes on average, at most "
            f"{trace.peak:,}",
        ),
        (
            "run",
            f"{policy.min_workers:,} to {policy.max_workers:,} workers, "
            f"{layout or 'a layout of the planner'}, {run.job.num_microbatches:,} microbatches, "
            f"state {quantity(run.job.state_bytes)}B",
        ),
        (
            "costs",
            f"step {costs.step_s:.3g} s with all workers, warm-up {costs.warm_up_s:.3g} s, "
            f"detection {costs.detect_s:.3g} s, unwinding {costs.unwind_s:.3g} s, forming "
            f"{costs.form_s:.3g} s, "
            f"{quantity(costs.bytes_per_s)}B/s between workers",
        ),
    ]


def write_json(path: str, run: SimulatedRun, outcomes: Sequence[SystemOutcome]) -> None:
    """Write all results. Raises `UserError`."""
    content = {
        "trace": {
            "seconds": run.trace.end_s,
            "changes": run.trace.num_changes,
            "removed": run.trace.num_removed,
            "peak_nodes": run.trace.peak,
        },
        "costs": asdict(run.costs),
        "systems": [_row(outcome) for outcome in outcomes],
    }
    try:
        Path(path).write_text(json.dumps(content, indent=1) + "\n")
    except OSError as error:
        raise UserError(f"--json {path}: cannot be written ({error})") from None


def _row(outcome: SystemOutcome) -> dict[str, Any]:
    return {
        "system": outcome.system,
        "goodput": outcome.goodput,
        "capacity_used": outcome.use,
        "steps": outcome.steps,
        "steps_redone": outcome.redone,
        "pauses": len(outcome.pauses_s),
        "median_pause_s": outcome.median_pause_s,
        "p99_pause_s": outcome.p99_pause_s,
        "end_s": outcome.end_s,
        "finish_s": outcome.finish_s,
        "cost": outcome.cost,
        "spot_h": outcome.spot_h,
        "on_demand_h": outcome.on_demand_h,
    }


def _cell(column: str, outcome: SystemOutcome) -> str:
    match column:
        case "goodput":
            return f"{outcome.goodput:.2%}"
        case "capacity used":
            return f"{outcome.use:.2%}"
        case "steps":
            return f"{outcome.steps:,}"
        case "redone":
            return f"{outcome.redone:,}"
        case "pauses":
            return f"{len(outcome.pauses_s):,}"
        case "median":
            return duration(outcome.median_pause_s)
        case "p99":
            return duration(outcome.p99_pause_s)
        case "finished":
            return "no" if outcome.finish_s is None else duration(outcome.finish_s)
        case "spot h":
            return "" if outcome.spot_h is None else f"{outcome.spot_h:,.1f}"
        case "on-demand h":
            return "" if outcome.on_demand_h is None else f"{outcome.on_demand_h:,.1f}"
        case "cost":
            return "" if outcome.cost is None else f"{outcome.cost:,.2f}"
    raise AssertionError(f"no such column: {column}")
