"""The page of the benchmarks matches their results and names every benchmark."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from make_readme import FOLDER, NAMES, README, explanations, read_results, render, summary
from report import machine
from run_all import run

FIELDS = {"date", "commit", "machine", "command", "seconds", "musts", "tables"}


def test_benchmark_page_is_rendered_from_the_stored_results() -> None:
    assert README.read_text() == render(read_results()), "run `make bench-readme`"


def test_make_bench_runs_every_program_that_has_musts() -> None:
    programs = {file.stem for file in FOLDER.glob("*.py") if "conclude(" in file.read_text()}
    assert programs - {"report"} == set(NAMES)
    assert set(explanations()) <= {"", *NAMES}


def test_each_benchmark_has_a_result_with_all_fields_and_consistent_verdicts() -> None:
    results = read_results()
    assert set(results) == set(NAMES)
    for name, result in results.items():
        assert set(result) == FIELDS, name
        assert result["commit"], name
        for must in result["musts"]:
            at_least = must["measured"] >= must["bound"]
            at_most = must["measured"] <= must["bound"]
            assert must["met"] == (at_least if must["at_least"] else at_most), (name, must)


MET = {"what": "time", "measured": 1, "bound": 2, "unit": "s", "at_least": False, "met": True}
OLD = {"musts": [MET], "tables": [], "date": "2020-01-01", "commit": "old", "command": "old"}
WRITE = f"""
import json, sys
from pathlib import Path
Path(sys.argv[-1]).write_text(json.dumps({{"musts": [{MET!r}]}}))
"""
IGNORE_TERM = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
"""


def run_benchmark(
    tmp_path: Path, source: str, timeout_s: float = 60.0
) -> tuple[str, dict[str, Any]]:
    """The outcome and the new result of a benchmark that met its must before."""
    program, result = tmp_path / "benchmarks" / "core.py", tmp_path / "core.json"
    program.parent.mkdir()
    program.write_text(source)
    result.write_text(json.dumps(OLD))
    outcome = run(program, result, timeout_s, end_patience_s=0.5)
    return outcome, json.loads(result.read_text())


def test_benchmark_that_meets_its_musts_keeps_the_result_it_wrote(tmp_path: Path) -> None:
    assert run_benchmark(tmp_path, WRITE) == ("all musts met", {"musts": [MET]})


@pytest.mark.parametrize(
    ("source", "outcome"),
    [
        ("raise SystemExit(3)", "failed with exit code 3"),
        ("raise SystemExit(1)", "failed with exit code 1"),
        (f"{WRITE}raise SystemExit(1)", "failed with exit code 1"),
        ("", "ended without a result"),
    ],
)
def test_benchmark_that_crashes_is_shown_as_missed(
    tmp_path: Path, source: str, outcome: str
) -> None:
    actual, result = run_benchmark(tmp_path, source)
    assert actual == outcome
    assert set(result) == FIELDS and result["commit"]
    assert f"**missed**: `core.py --check` {outcome}" in summary({"core": result})


def test_benchmark_that_hangs_and_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    started = time.monotonic()
    outcome, result = run_benchmark(tmp_path, f"{WRITE}{IGNORE_TERM}time.sleep(600)", timeout_s=2.0)
    assert outcome == "not finished after 2 s"
    assert "**missed**" in summary({"core": result})
    assert time.monotonic() - started < 30.0


def test_result_names_the_processor() -> None:
    parts = machine().split(", ")
    assert f"{os.cpu_count()} cores" in parts[1:]
    assert parts[0] and "cores" not in parts[0]
