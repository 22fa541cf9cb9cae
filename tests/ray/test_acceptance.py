"""A run follows its cluster from no node to five workers, through the death of nodes and of all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
from command_line import PATIENCE_S, ROOT, assert_no_process_left, ray_folder

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
PROGRAMS = ROOT / "tests" / "processes"
EVENTS = 5


@pytest.mark.soak
def test_run_follows_its_cluster_with_at_most_one_step_redone_an_event(tmp_path: Path) -> None:
    with ray_folder() as folder:
        Path(folder, "ray").mkdir()
        ended = subprocess.run(
            [sys.executable, Path(__file__).with_name("acceptance_script.py"), tmp_path, folder],
            capture_output=True,
            text=True,
            timeout=2 * PATIENCE_S,
            check=False,
            env={**os.environ, "RAY_TMPDIR": folder, "PYTHONPATH": f"{ROOT}:{PROGRAMS}"},
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr
        assert_no_process_left(folder)
    [line] = [line for line in ended.stdout.splitlines() if line.startswith("{")]
    observed = json.loads(line)
    seen, rows = observed["seen"], observed["rows"]
    assert len(seen) == EVENTS
    steps = [row["step"] for row in rows]
    assert sorted(set(steps)) == list(range(1, max(steps) + 1))
    redone = Counter(steps)
    ends = [0, *(step for _, step in seen), max(steps)]
    for first, last in pairwise(ends):
        again = sum(redone[step] - 1 for step in range(first + 1, last + 1))
        assert again <= 1, f"{again} steps redone between steps {first} and {last}: {seen}"
    losses = {row["step"]: row["loss"] for row in rows}
    assert losses == pytest.approx(dict(enumerate(observed["plain"], start=1)), rel=1e-9)
