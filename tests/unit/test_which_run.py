"""Which tests run: slow ones while there is time, and known cases only with `make soak`."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

from which_run import soak_cases

TESTS = Path(__file__).parents[1]
CODE = """
import pytest

def test_quick(): pass

@pytest.mark.slow
def test_slow(): pass
"""


def test_each_soak_case_belongs_to_a_test() -> None:
    for case in soak_cases():
        path, _, name = case.partition("::")
        tree = ast.parse((TESTS.parent / path).read_text())
        functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        assert name.partition("[")[0] in functions, case


def run_pytest(folder: Path, end: str) -> str:
    (folder / "test_two.py").write_text(CODE)
    command = [sys.executable, "-m", "pytest", "-p", "which_run", "--rootdir", str(folder)]
    ended = subprocess.run(
        [*command, str(folder)],
        env=os.environ | {"ELASTIC_TESTS_END": end, "PYTHONPATH": str(TESTS)},
        capture_output=True,
        text=True,
        check=True,
    )
    return ended.stdout


def test_no_slow_test_begins_after_the_end(tmp_path: Path) -> None:
    output = run_pytest(tmp_path, "1")
    assert "1 passed, 1 skipped" in output
    assert "no time is left for slow tests: 1 of them did not run" in output
    assert "2 passed" in run_pytest(tmp_path, "inf")
