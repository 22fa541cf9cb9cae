"""What every benchmark prints: a table, where it was measured, and whether the musts are met."""

from __future__ import annotations

import argparse
import os
import platform
import random
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from statistics import median

import psutil
from rich.console import Console
from rich.table import Table

PACKAGES = ("torch", "ray", "torchft-nightly")
NUM_RESAMPLES = 10_000

console = Console(width=None if sys.stdout.isatty() else 110, highlight=False)


@dataclass(frozen=True)
class Must:
    """A bound that a result has to keep: `measured` at most, or at least, `bound`."""

    what: str
    measured: float
    bound: float
    unit: str = "s"
    at_least: bool = False

    @property
    def is_met(self) -> bool:
        return self.measured >= self.bound if self.at_least else self.measured <= self.bound

    def __str__(self) -> str:
        sign = "at least" if self.at_least else "at most"
        verdict = "[green]met[/]" if self.is_met else "[red]MISSED[/]"
        found = f"{self.what}: {self.measured:.4g} {self.unit}"
        return f"{found}, must be {sign} {self.bound:g}: {verdict}"


def parser(description: str) -> argparse.ArgumentParser:
    """Every benchmark takes `--check`, and ends what it has started when it is told to end."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    arguments = argparse.ArgumentParser(description=description)
    arguments.add_argument("--check", action="store_true", help="exit 1 when a must is missed")
    return arguments


def show_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    table = Table(title=title, title_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left")
    for row in rows:
        table.add_row(*row)
    console.print(table)


def conclude(musts: Sequence[Must], check: bool) -> int:
    """Print where and how this was measured and each must; return the exit code."""
    console.print(f"{date.today()} · {machine()} · {command()}")
    for must in musts:
        console.print(str(must))
    return int(check and not all(must.is_met for must in musts))


def machine() -> str:
    """Cores, memory and versions; no names or paths of this machine."""
    memory_gb = psutil.virtual_memory().total / 2**30
    versions = [f"Python {platform.python_version()}"]
    for package in PACKAGES:
        try:
            versions.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    return f"{os.cpu_count()} cores, {memory_gb:.0f} GB, {', '.join(versions)}"


def command() -> str:
    return " ".join(["benchmarks/" + os.path.basename(sys.argv[0]), *sys.argv[1:]])


def bootstrap_interval(values: Sequence[float]) -> tuple[float, float]:
    """The 95 % interval of the median, by resampling (Efron, 1979), always with the same seed."""
    source = random.Random(0)
    medians = sorted(median(source.choices(values, k=len(values))) for _ in range(NUM_RESAMPLES))
    return medians[int(0.025 * NUM_RESAMPLES)], medians[int(0.975 * NUM_RESAMPLES)]
