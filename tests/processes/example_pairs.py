"""Example scripts before and after their conversion: changed lines, and runs through kills."""

from __future__ import annotations

import subprocess
import sys
from difflib import SequenceMatcher
from pathlib import Path

from harness import Outcome, run_in_processes
from run_checks import assert_no_step_repeated

from actors.runtime.fault_spec import Fault
from elastic.protocol.events import Event
from pipelines.loop.script import script_of
from pipelines.run.recipes import load

EXAMPLES = Path(__file__).parents[2] / "examples"
MAX_CHANGED_LINES = 15
KILLS = (Fault("kill", "w1", 8, "compute"), Fault("kill", "w2", 20, "vote"))


def count_lines(name: str) -> tuple[int, int]:
    """The lines of the example that are new after the conversion, and those that are gone."""
    before, after = (
        [line.strip() for line in (EXAMPLES / f"{name}_{when}.py").read_text().splitlines()]
        for when in ("before", "after")
    )
    matcher = SequenceMatcher(None, before, after, autojunk=False)
    changes = [change for change in matcher.get_opcodes() if change[0] != "equal"]
    return sum(d - c for _, _, _, c, d in changes), sum(b - a for _, a, b, _, _ in changes)


def output_before(name: str) -> str:
    """What the script prints as a plain script."""
    command = [sys.executable, EXAMPLES / f"{name}_before.py"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def run_after(
    folder: Path,
    name: str,
    faults: tuple[Fault, ...] = KILLS,
    num_workers: int = 3,
    due: tuple[tuple[int, Event], ...] = (),
    **environment: str,
) -> Outcome:
    """A run of the converted script on workers of which two die."""
    recipe = f"{EXAMPLES / f'{name}_after.py'}:main"
    settings = script_of(load(recipe).function).settings
    run = run_in_processes(
        folder,
        settings,
        num_workers,
        layout=f"dp={num_workers}",
        recipe=recipe,
        faults=faults,
        due=due,
        environment=environment,
    )
    assert run.stopped.outcome == "completed", run.stopped
    assert_no_step_repeated(run)
    assert len(run.lines_of("WorkerLost")) == len(faults), run.story()
    return run
