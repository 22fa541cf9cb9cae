"""The output of every benchmark: tables, machine and versions, and whether the musts are met.

With `--json` it is also written to a file, which `run_all.py` and `make_readme.py` read.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

PACKAGES = ("torch", "ray", "mlflow", "torchft-nightly")
NUM_RESAMPLES = 10_000

console = Console(width=None if sys.stdout.isatty() else 110, highlight=False)


@dataclass(frozen=True)
class Must:
    """A required bound of a result: `measured` at most, or at least, `bound`."""

    what: str
    measured: float
    bound: float
    unit: str = "s"
    at_least: bool = False

    @property
    def is_met(self) -> bool:
        return self.measured >= self.bound if self.at_least else self.measured <= self.bound

    def as_json(self) -> dict[str, Any]:
        return {
            "what": self.what,
            "measured": self.measured,
            "bound": self.bound,
            "unit": self.unit,
            "at_least": self.at_least,
            "met": self.is_met,
        }

    def __str__(self) -> str:
        sign = "at least" if self.at_least else "at most"
        verdict = "[green]met[/]" if self.is_met else "[red]MISSED[/]"
        text = f"{self.what}: {self.measured:.4g} {self.unit}"
        return f"{text}, must be {sign} {self.bound:g}: {verdict}"


class _Parser(argparse.ArgumentParser):
    """Stores the file for the results, for `conclude`."""

    def parse_args(self, *given: Any, **more: Any) -> argparse.Namespace:
        options = super().parse_args(*given, **more)
        _page.file, _page.began = options.json, time.monotonic()
        return options


class _Page:
    """The data that `conclude` writes besides the musts."""

    def __init__(self) -> None:
        self.file: Path | None = None
        self.began = time.monotonic()
        self.tables: list[dict[str, Any]] = []


_page = _Page()


def parser(description: str) -> argparse.ArgumentParser:
    """A parser with `--check` and `--json`. On SIGTERM a benchmark ends the programs that it has
    started."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    arguments = _Parser(description=description)
    arguments.add_argument("--check", action="store_true", help="exit 1 when a must is missed")
    arguments.add_argument("--json", type=Path, metavar="FILE", help="write the results to FILE")
    return arguments


def show_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    _page.tables.append({"title": title, "columns": [*columns], "rows": [[*row] for row in rows]})
    table = Table(title=title, title_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left")
    for row in rows:
        table.add_row(*row)
    console.print(table)


def conclude(musts: Sequence[Must], check: bool) -> int:
    """Print date, machine, command and each must; return the exit code."""
    console.print(f"{date.today()} · {machine()} · {command()}")
    for must in musts:
        console.print(str(must))
    if _page.file is not None:
        seconds = time.monotonic() - _page.began
        write_result(_page.file, musts, command(), seconds, _page.tables)
    return int(check and not all(must.is_met for must in musts))


def write_result(
    file: Path,
    musts: Sequence[Must],
    command: str,
    seconds: float,
    tables: Sequence[dict[str, Any]] = (),
) -> None:
    """Write one JSON object: commit, date, machine, versions, command, tables and musts."""
    result = {
        "date": str(date.today()),
        "commit": commit(),
        "machine": machine(),
        "command": command,
        "seconds": round(seconds),
        "musts": [must.as_json() for must in musts],
        "tables": list(tables),
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")


def commit() -> str:
    """The short hash of the measured commit, with a `+` if files differ from it."""

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", *arguments], cwd=Path(__file__).parent, capture_output=True, text=True,
            check=False,
        ).stdout.strip()  # fmt: skip

    changed = git(
        "status", "--porcelain", "--untracked-files=no", "--", "..", ":!results", ":!README.md"
    )
    return git("rev-parse", "--short", "HEAD") + ("+" if changed else "")


def machine() -> str:
    """The processor, cores, memory, GPUs and versions, without names or paths of the machine."""
    memory_gb = psutil.virtual_memory().total / 2**30
    versions = [f"Python {platform.python_version()}"]
    for package in PACKAGES:
        try:
            versions.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    parts = [processor(), f"{os.cpu_count()} cores", f"{memory_gb:.0f} GB", *gpus(), *versions]
    return ", ".join(part for part in parts if part)


def processor() -> str:
    """The model of the CPU on Linux; elsewhere its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.machine()


def gpus() -> list[str]:
    """The number of GPUs of each model of `nvidia-smi`; empty without GPUs."""
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True, check=False)
    names = Counter(done.stdout.splitlines() if done.returncode == 0 else ())
    return [f"{number} {name}" for name, number in names.items()]


def command() -> str:
    """The command line without `--json FILE`."""
    words = sys.argv[1:]
    if "--json" in words:
        index = words.index("--json")
        words = words[:index] + words[index + 2 :]
    return " ".join(["benchmarks/" + os.path.basename(sys.argv[0]), *words])


def bootstrap_interval(values: Sequence[float]) -> tuple[float, float]:
    """The 95 % interval of the median by bootstrap (Efron, 1979), with a fixed seed."""
    source = random.Random(0)
    medians = sorted(median(source.choices(values, k=len(values))) for _ in range(NUM_RESAMPLES))
    return medians[int(0.025 * NUM_RESAMPLES)], medians[int(0.975 * NUM_RESAMPLES)]
