"""The benchmarks' page says what their results say, and every benchmark is among them."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from make_readme import FOLDER, NAMES, README, explanations, read_results, render

FIELDS = {"recorded", "date", "commit", "machine", "command", "seconds", "musts", "tables"}


def test_the_readme_is_what_the_results_give() -> None:
    assert README.read_text() == render(read_results()), "run `make bench-readme`"


def test_make_bench_runs_every_program_that_has_musts() -> None:
    programs = {file.stem for file in FOLDER.glob("*.py") if "conclude(" in file.read_text()}
    assert programs - {"report"} == set(NAMES)
    assert set(explanations()) <= {"", *NAMES}


def test_results_have_all_fields_and_each_must_says_whether_it_is_met() -> None:
    for name, result in read_results().items():
        assert name in NAMES
        assert set(result) == FIELDS, name
        assert result["commit"] or result["recorded"] == "by hand"
        for must in result["musts"]:
            at_least = must["measured"] >= must["bound"]
            at_most = must["measured"] <= must["bound"]
            assert must["met"] == (at_least if must["at_least"] else at_most), (name, must)
