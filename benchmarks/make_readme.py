"""Generates `README.md` from the results in `results` and the texts in `explanations.md`."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
RESULTS = FOLDER / "results"
README = FOLDER / "README.md"
EXPLANATIONS = FOLDER / "explanations.md"
NAMES = (
    "recovery", "goodput", "simulate", "churn", "growth", "overhead", "api", "peace", "data",
    "scaling", "layouts", "core", "memory", "plan_memory", "plan",
    "reshard", "snapshot", "checkpoint", "large_model", "long_run",
)  # fmt: skip
"""All benchmarks in the order of the page."""
Result = dict[str, Any]


def read_results() -> dict[str, Result]:
    """The recorded results by name of the benchmark."""
    return {file.stem: json.loads(file.read_text()) for file in sorted(RESULTS.glob("*.json"))}


def explanations() -> dict[str, str]:
    """The sections of `explanations.md` by name; the introduction is under ""."""
    begin, *others = re.split(r"^## (\w+)\n", EXPLANATIONS.read_text(), flags=re.MULTILINE)
    texts = {name: text.strip() for name, text in zip(others[::2], others[1::2], strict=True)}
    return {"": begin.strip(), **texts}


def render(results: Mapping[str, Result]) -> str:
    """The full page."""
    texts = explanations()
    parts = [texts[""], "## Results", summary(results)]
    for name, result in in_order(results):
        parts += section(name, result, texts.get(name, ""))
    return "\n\n".join(part for part in parts if part) + "\n"


def summary(results: Mapping[str, Result]) -> str:
    """A table with one row for each benchmark."""
    rows = []
    for name, result in in_order(results):
        missed = [must["what"] for must in result["musts"] if not must["met"]]
        verdict = f"**missed**: {'; '.join(missed)}" if missed else "all met"
        rows.append([f"[`{name}.py`](#{name})", verdict, result["date"], result["commit"]])
    return table(["program", "musts", "date", "commit"], rows)


def in_order(results: Mapping[str, Result]) -> list[tuple[str, Result]]:
    return [(name, results[name]) for name in NAMES if name in results]


def section(name: str, result: Result, text: str) -> list[str]:
    """The section of one benchmark: its tables and its text."""
    source = f"{result['date']} · commit {result['commit']} · {result['machine']}"
    parts = [f"### {name}", f"`{result['command']}` · {source}"]
    if result["musts"]:
        columns = ["must", "measured", "bound", ""]
        parts.append(table(columns, [must_row(must) for must in result["musts"]]))
    for entry in result["tables"]:
        title = f"{entry['title']}:" if entry["title"] else ""
        parts += [title, table(entry["columns"], entry["rows"])]
    return [*parts, text]


def must_row(must: Mapping[str, Any]) -> list[str]:
    sign = "at least" if must["at_least"] else "at most"
    unit = f" {must['unit']}" if must["unit"] else ""
    verdict = "met" if must["met"] else "**missed**"
    return [
        must["what"],
        f"{must['measured']:.4g}{unit}",
        f"{sign} {must['bound']:g}{unit}",
        verdict,
    ]


def table(columns: list[str], rows: list[list[str]]) -> str:
    """A table in Markdown."""
    lines = [columns, ["---"] * len(columns), *rows]
    cells = [[cell.replace("|", "\\|") for cell in line] for line in lines]
    return "\n".join(re.sub(r" +", " ", f"| {' | '.join(line)} |") for line in cells)


if __name__ == "__main__":
    README.write_text(render(read_results()))
    sys.exit(0)
