"""`elastic simulate`: simulate, print, and write what was asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console

from actors.simulation.simulation import simulate as simulate_run
from elastic.geometry.errors import ElasticError
from pipelines.errors import UserError
from pipelines.observe.history.history import History
from pipelines.simulation.outcome import (
    THIS_SYSTEM,
    SystemOutcome,
    chooses_market,
    outcome_of,
    restart_outcomes,
)
from pipelines.simulation.picture import draw_simulation
from pipelines.simulation.plan import plan_run
from pipelines.simulation.request import SimulateRequest
from pipelines.simulation.tables import print_results, write_json
from pipelines.simulation.variants import compares_workers, variants_of


def simulate(request: SimulateRequest, console: Console) -> int:
    """Simulate a run and report; return 0. Raises `UserError`."""
    if request.plot and request.compare:
        raise UserError("--plot draws one run: leave out --compare, or draw a variant with --set")
    name = Path(request.trace).name if request.trace else f"{request.generate}"
    history = History()

    def take(line: dict[str, Any], is_metrics: bool) -> None:
        if request.plot:
            history.take([] if is_metrics else [line], [line] if is_metrics else [])

    variants = variants_of(request)
    runs = [plan_run(variant) for _, variant in variants]  # all mistakes before the first result
    outcomes: list[SystemOutcome] = []
    for (label, variant), run in zip(variants, runs, strict=True):
        try:
            result = simulate_run(run, take)
        except ElasticError as error:
            raise UserError(f"--layout {variant.layout or ''}: {error}") from None
        outcomes.append(outcome_of(run, result, request.price, label or THIS_SYSTEM))
    if not compares_workers(request) and not any(map(chooses_market, runs)):
        # those of one variant would not be those of another, and know no on-demand machines
        outcomes += restart_outcomes(runs[0], request.price)
    print_results(console, name, runs[0], outcomes)
    if request.json:
        write_json(request.json, runs[0], outcomes)
    if request.plot:
        draw_simulation(history, runs[0].trace, name, request.plot)
    return 0
