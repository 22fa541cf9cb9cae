"""Tables of `elastic plan RECIPE`: the ranking, and the memory of each layout by kind."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from elastic.planner.devices import DeviceSpec
from elastic.planner.layout_ranking import Estimate, LayoutRanking
from elastic.planner.models.worker_memory import WorkerMemory
from pipelines.observe.history.formatting import counted, quantity

NUM_FITTING = 8
NUM_TOO_BIG = 3
SHORT_KINDS = {"communication": "comm."}


def show_ranking(
    console: Console, recipe: str, device: DeviceSpec, ranking: LayoutRanking, seq_len: int
) -> None:
    """Print the best layouts for a number of workers, and what wins or loses."""
    fitting = [estimate for estimate in ranking.estimates if estimate.is_fitting]
    too_big = [estimate for estimate in ranking.estimates if not estimate.is_fitting]
    shown = fitting[:NUM_FITTING] + too_big[:NUM_TOO_BIG]
    workers = counted(ranking.num_workers, "worker")
    title = f"{recipe} on {workers}, {device.name} with {device.memory_gb:g} GB"
    console.print(_speed_table(title, shown, seq_len))
    console.print(_memory_table(shown))
    if hidden := len(ranking.estimates) - len(shown):
        num_hidden = len(fitting) - len(fitting[:NUM_FITTING])
        console.print(
            f"not shown: {num_hidden} slower layouts, {hidden - num_hidden} that do not fit "
            "(--json lists all)",
            highlight=False,
        )
    for refusal in ranking.refusals[:NUM_TOO_BIG]:
        console.print(f"not possible: {refusal}", highlight=False)
    best = ranking.best
    if best is None:
        console.print(f"no layout fits {workers}: {_advice(ranking)}", highlight=False)
    else:
        console.print(
            f"elastic train {recipe} --workers {best.layout.num_workers} --layout {best.layout}",
            highlight=False,
            soft_wrap=True,
        )
    console.print()


def _advice(ranking: LayoutRanking) -> str:
    if not ranking.estimates:
        return "give other --workers or another --layout"
    kinds = WorkerMemory._fields
    memory = ranking.estimates[0].memory
    largest = max(kinds, key=lambda kind: getattr(memory, kind))
    if largest == "activations":
        return "lower microbatch, or --set activation_checkpointing=full"
    return "take more workers, a larger device, or --set dtype=bfloat16"


def _speed_table(title: str, estimates: list[Estimate], seq_len: int) -> Table:
    has_price = any(estimate.cost is not None for estimate in estimates)
    table = Table(title=title, title_justify="left")
    table.add_column("layout", no_wrap=True)
    table.add_column("GB", justify="right")
    unit = "tokens/s" if seq_len > 1 else "samples/s"
    for column in ("s a step", "MFU", unit, "hours", *(["price"] if has_price else [])):
        table.add_column(column, justify="right")
    table.add_column("why")
    for estimate in estimates:
        speed = [
            f"{estimate.step_s:.3g}",
            f"{estimate.mfu:.1%}",
            quantity(estimate.samples_per_s * max(1, seq_len)),
            _number(estimate.hours),
            *([_number(estimate.cost or 0.0)] if has_price else []),
        ]
        if not estimate.is_fitting:
            speed = ["-"] * len(speed)
        table.add_row(str(estimate.layout), _gb(estimate.memory.total), *speed, estimate.reason)
    return table


def _memory_table(estimates: list[Estimate]) -> Table:
    table = Table(title="GB of a worker at the peak of a step", title_justify="left")
    table.add_column("layout", no_wrap=True)
    kinds = WorkerMemory._fields
    for kind in kinds:
        table.add_column(SHORT_KINDS.get(kind, kind), justify="right")
    for estimate in estimates:
        cells = [_gb(getattr(estimate.memory, kind)) for kind in kinds]
        table.add_row(str(estimate.layout), *cells)
    return table


def _gb(num_bytes: int) -> str:
    return _number(num_bytes / 1e9)


def _number(value: float) -> str:
    """Three digits, without an exponent."""
    if value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}" if value >= 0.01 or not value else "<0.01"
