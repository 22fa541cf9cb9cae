"""`elastic plan --model-params`: memory per worker by precision, ZeRO stage, number of workers."""

from __future__ import annotations

import re
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from elastic.geometry.zero import PARTS, STAGES
from elastic.planner.footprint import FOOTPRINTS, Footprint, Precision
from pipelines.errors import UserError

TITLES: dict[Precision, str] = {
    "half": "half precision throughout",
    "mixed": "mixed precision, Adam",
    "full": "fp32, Adam, with activations",
}


def print_footprints(num_params: float | None, shard_counts: str) -> None:
    """Print the tables of `elastic plan --model-params`. Raises `UserError`."""
    if num_params is None:
        raise UserError("give a recipe, e.g. elastic plan byte_lm, or --model-params, e.g. 7e9")
    if not 1 <= num_params < float("inf"):
        raise UserError(f"--model-params {num_params:g}: give 1 or more parameters, e.g. 7e9")
    for formula, table in footprint_tables(num_params, parse_counts(shard_counts)):
        Console(soft_wrap=True).print(formula, highlight=False)
        Console().print(table)


def footprint_tables(num_params: float, shard_counts: Sequence[int]) -> list[tuple[str, Table]]:
    """For each precision its formula and a table of 10^9 bytes per worker, a row per ZeRO stage."""
    chosen = ((title, FOOTPRINTS[precision]) for precision, title in TITLES.items())
    return [
        (f"{title}: {_formula(footprint)}", _table(footprint, num_params, shard_counts))
        for title, footprint in chosen
    ]


def parse_counts(text: str) -> list[int]:
    """Read `1,8,64`. Raises `UserError`."""
    counts = [part.strip() for part in text.split(",")]
    bad = [part for part in counts if not re.fullmatch(r"0*[1-9][0-9]{0,11}", part)]
    if bad:
        message = f"'{bad[0]}' is not a number of workers; write e.g. 1,8,64"
        raise UserError(f"--world-sizes {text}: {message}")
    return [int(part) for part in counts]


def _table(footprint: Footprint, num_params: float, shard_counts: Sequence[int]) -> Table:
    table = Table()
    table.add_column("zero")
    table.add_column("sharded")
    for count in shard_counts:
        table.add_column("1 worker" if count == 1 else f"{count:,} workers", justify="right")
    for stage, what in zip(STAGES, _sharded_parts(), strict=True):
        sizes = (footprint.divided(stage, count) * num_params / 1e9 for count in shard_counts)
        table.add_row(str(stage), what, *(f"{size:,.4g} GB" for size in sizes))
    return table


def _sharded_parts() -> list[str]:
    """The part that each stage shards in addition to the stage before it."""
    first, *others = PARTS
    return ["nothing", first, *(f"+ {part}" for part in others)]


def _formula(footprint: Footprint) -> str:
    parts = {
        "parameters": footprint.parameters,
        "gradients": footprint.gradients,
        "optimizer": footprint.optimizer,
        "activations": footprint.activations,
    }
    terms = " + ".join(f"{size} {name}" for name, size in parts.items() if size)
    return f"{terms} = {footprint.total} bytes per parameter"
