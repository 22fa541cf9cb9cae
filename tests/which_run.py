"""Which tests run: the cases of `soak_cases.txt` only with `make soak`, and slow tests only while
there is time.

`ELASTIC_TESTS_END` is the time, in seconds since 1970, from which no further test marked `slow`
begins; those come last. Files begin at another letter of the alphabet with each commit, so that it
is not always the same ones for which no time is left.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from sim.fresh_seeds import base

CASES = Path(__file__).with_name("soak_cases.txt")
TOO_LATE = "no time is left for slow tests"
END = float(os.environ.get("ELASTIC_TESTS_END", "inf"))


def soak_cases() -> list[str]:
    lines = CASES.read_text().splitlines()
    return [f"tests/{line}" for line in lines if line and not line.startswith("#")]


@pytest.hookimpl(tryfirst=True)  # before tests are deselected by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Raises `pytest.UsageError` for a case that its test does not have."""
    by_id = {item.nodeid: item for item in items}
    tests = {nodeid.partition("[")[0] for nodeid in by_id}
    is_whole = not any("::" in argument for argument in items[0].config.args) if items else False
    for case in soak_cases():
        if case in by_id:
            by_id[case].add_marker(pytest.mark.soak)
        elif is_whole and case.partition("[")[0] in tests:
            raise pytest.UsageError(f"{CASES.name}: {case} is no case of its test")
    first = chr(ord("a") + base() // 1_000_000 % 26)
    items.sort(key=lambda item: _place(item, first))


def _place(item: pytest.Item, first: str) -> tuple[str, bool, bool, str]:
    """Within each folder slow tests come last, and files from the letter `first` on first."""
    name = item.path.stem.removeprefix("test_")
    is_slow = item.get_closest_marker("slow") is not None
    return str(item.path.parent), is_slow, name < first, name


def pytest_runtest_setup(item: pytest.Item) -> None:
    if time.time() > END and item.get_closest_marker("slow"):
        pytest.skip(TOO_LATE)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports = terminalreporter.stats.get("skipped", [])
    num_late = sum(TOO_LATE in str(report.longrepr) for report in reports)
    if num_late:
        terminalreporter.write_line(f"{TOO_LATE}: {num_late} of them did not run")
