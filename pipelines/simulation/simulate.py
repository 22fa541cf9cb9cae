"""`elastic simulate`: simulate, print, and write what was asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console

from actors.simulation.simulation import simulate as simulate_run
from elastic.geometry.errors import ElasticError
from pipelines.errors import UserError
from pipelines.observe.history.history import History
from pipelines.simulation.outcome import outcome_of, restart_outcomes
from pipelines.simulation.picture import draw_simulation
from pipelines.simulation.plan import plan_run
from pipelines.simulation.request import SimulateRequest
from pipelines.simulation.tables import print_results, write_json


def simulate(request: SimulateRequest, console: Console) -> int:
    """Simulate a run and report; return 0. Raises `UserError`."""
    run = plan_run(request)
    name = Path(request.trace).name if request.trace else f"{request.generate}"
    history = History()

    def take(line: dict[str, Any], is_metrics: bool) -> None:
        if request.plot:
            history.take([] if is_metrics else [line], [line] if is_metrics else [])

    try:
        result = simulate_run(run, take)
    except ElasticError as error:
        raise UserError(f"--layout {request.layout or ''}: {error}") from None
    outcomes = [
        outcome_of(run, result, request.price),
        *restart_outcomes(run, request.price),
    ]
    print_results(console, name, run, outcomes)
    if request.json:
        write_json(request.json, run, outcomes)
    if request.plot:
        draw_simulation(history, run.trace, name, request.plot)
    return 0
