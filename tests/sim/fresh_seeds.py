"""Seeds that are new with each commit, and kept seeds on which a test has failed before.

The base is `ELASTIC_SIM_BASE`, or follows from the commit's hash. `ELASTIC_SIM_SEED` is the only
seed to run, which replays a failure. A seed in `kept_seeds.txt` runs each time.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

FOLDER = Path(__file__).parent
KEPT = FOLDER / "kept_seeds.txt"
SOAK = 100_000
"""Where the seeds of `make soak` begin, so that they differ from those of each commit."""
FreshSeeds = Callable[[int, int], Iterator[int]]
"""The fixture `fresh_seeds`: the seeds of a chunk, from its first number and its size."""


@cache
def base() -> int:
    """The number that is added to the seeds of this run."""
    given = os.environ.get("ELASTIC_SIM_BASE")
    if given is not None:
        return int(given)
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=FOLDER, capture_output=True, text=True, check=False
    )
    return int(commit.stdout[:8], 16) % 100_000 * 1_000_000 if commit.returncode == 0 else 0


def fresh(test: str, first: int, number: int) -> Iterator[int]:
    """The seeds of one chunk of a test."""
    is_first = first in (0, SOAK)
    replayed = os.environ.get("ELASTIC_SIM_SEED")
    if replayed is not None:
        yield from [int(replayed)] if is_first else []
        return
    yield from kept(test) if is_first else []
    yield from range(base() + first, base() + first + number)


def kept(test: str) -> list[int]:
    """The seeds on which a test has failed before."""
    lines = [line.split() for line in KEPT.read_text().splitlines()]
    return [int(words[1]) for words in lines if words and words[0] == test]


def replay(test: str, seed: int) -> str:
    """The command that runs one seed of a test, which is a file and a function."""
    return f"ELASTIC_SIM_SEED={seed} .venv/bin/pytest {test}"


def keep(test: str, seed: int) -> None:
    """Add a seed to the kept ones, once; its reason is added by hand."""
    if seed not in kept(test):
        with KEPT.open("a") as file:
            file.write(f"{test} {seed} # to be explained\n")
