"""Continuous integration fails with a message if it takes over 30 minutes."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / ".ci" / "run"


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
@pytest.mark.parametrize(
    ("recipe", "limit_s", "code", "is_too_long"),
    [
        ("true", 1800, 0, False),
        ("false", 1800, 2, False),
        ("sleep 1.5", 0, 1, True),
        ("sleep 1.5; false", 0, 2, True),
    ],
)
def test_ci_run_that_takes_too_long_fails(
    tmp_path: Path, recipe: str, limit_s: int, code: int, is_too_long: bool
) -> None:
    text = SCRIPT.read_text()
    assert "\nMOST_S=1800\n" in text
    (tmp_path / ".ci").mkdir()
    script = tmp_path / ".ci" / "run"
    script.write_text(text.replace("MOST_S=1800", f"MOST_S={limit_s}"))
    (tmp_path / "Makefile").write_text(f"ci:\n\t{recipe}\n")
    done = subprocess.run(
        ["bash", str(script)], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == code
    assert ("all tests took" in done.stderr) == is_too_long
