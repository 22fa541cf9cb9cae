"""The doctor on a real cluster: it joins, asks each node, and leaves nothing behind."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from command_line import ROOT
from head import head


@pytest.mark.slow
def test_a_cluster_that_is_well(tmp_path: Path) -> None:
    with head(2) as cluster:
        ended = subprocess.run(
            [sys.executable, "-m", "pipelines", "doctor", "--storage", str(tmp_path / "runs")],
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
            cwd=ROOT,
            env={**cluster.environment, "RAY_ADDRESS": cluster.address},
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr
        assert "1 node, 2 CPUs" in ended.stdout
        assert "the same sources and versions as here" in ended.stdout
        assert not cluster.actors()
    assert not list(tmp_path.iterdir())
