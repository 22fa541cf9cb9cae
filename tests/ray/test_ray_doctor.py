"""`elastic doctor` on a real cluster: it joins, queries each node and leaves nothing behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import ROOT
from shared_cluster import NUM_CPUS, SharedCluster


@pytest.mark.slow
def test_doctor_finds_no_problem_on_a_healthy_cluster(
    tmp_path: Path, shared_ray_cluster: SharedCluster
) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "pipelines", "doctor", "--storage", str(tmp_path / "runs")],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        cwd=ROOT,
        env={**os.environ, "RAY_ADDRESS": shared_ray_cluster.address},
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert f"1 node, {NUM_CPUS} CPUs" in ended.stdout
    assert "the same sources and versions as here" in ended.stdout
    assert not shared_ray_cluster.actors()
    assert not list(tmp_path.iterdir())
