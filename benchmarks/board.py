"""Writes the tables of `docs/goodput.md` from the results that the benchmarks have written.

python benchmarks/board.py            writes the page
python benchmarks/board.py --check    exits with 1 if the page is out of date
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from make_readme import Result, read_results, table

sys.path.insert(0, str(Path(__file__).parents[1] / "docs"))
from generated import ROOT, keep

PAGE = ROOT / "docs" / "goodput.md"
HEAD = ["figure", "value", "measured"]
Rows = Iterator[tuple[str, str]]


def rows_of(result: Result, title: str) -> list[dict[str, str]]:
    """The rows of a result's table whose title begins so, by column."""
    [found] = [t for t in result["tables"] if t["title"].startswith(title)]
    return [dict(zip(found["columns"], row, strict=True)) for row in found["rows"]]


def goodput(result: Result) -> Rows:
    for row in rows_of(result, "Goodput"):
        said = row["system"]
        value = f"{row['goodput']} of the time, {row['capacity used']} of the capacity"
        yield f"goodput on {row['trace']}: {said}", value


def recovery(result: Result) -> Rows:
    for row in rows_of(result, "SIGKILL"):
        redone = row["steps redone (most)"]
        yield (
            f"a worker dies, until the next new step: {row['system']}",
            f"{row['median s']} s, {redone} steps redone",
        )


def growth(result: Result) -> Rows:
    pauses = sorted(float(row["pause s"]) for row in rows_of(result, "growth"))
    yield (
        "two workers become four: pause",
        f"{pauses[len(pauses) // 2]:.2f} s at the median, at most {pauses[-1]:.2f} s",
    )


def peace(result: Result) -> Rows:
    for row in rows_of(result, ""):
        workers = "1 worker" if row["workers"] == "1" else f"{row['workers']} workers"
        if row["system"] == "ours":
            ratios = [
                f"{row[column]} of {peer}" for column, peer in PEERS.items() if row.get(column)
            ]
            yield (
                f"a step without faults: {row['model']}, {workers}",
                " and ".join(ratios),
            )


PEERS = {"to torchrun": "torchrun's", "to Ray Train": "Ray Train's"}
PARTS: Mapping[str, Callable[[Result], Rows]] = {
    "goodput": goodput,
    "recovery": recovery,
    "growth": growth,
    "peace": peace,
}
"""The figures of each benchmark, in the order of the page."""


def board(results: Mapping[str, Result]) -> str:
    """One table for all benchmarks; each row has the date and the commit of its measurement."""
    rows = []
    for name, part in PARTS.items():
        result = results[name]
        source = f"{result['date']}, {result['commit']}, `{name}.py`"
        rows += [[figure, value, source] for figure, value in part(result)]
    return table(HEAD, rows)


def machines(results: Mapping[str, Result]) -> str:
    known = dict.fromkeys(results[name]["machine"] for name in PARTS)
    return "Machine: " + "; ".join(known) + "."


if __name__ == "__main__":
    recorded = read_results()
    keep(PAGE, {"board": board(recorded), "machine": machines(recorded)})
