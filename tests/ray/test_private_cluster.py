"""The processes of a private cluster: those of Ray that a run needs, and no others."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import ray_folder

pytestmark = pytest.mark.slow

STARTING = """
import json, time
import psutil, ray
from pathlib import Path
from actors.ray_backend.driver import join_or_start_cluster

join_or_start_cluster("local", 1, False, "test")
remote = ray.remote(lambda: True)
assert ray.get(remote.remote())
time.sleep(3.0)
processes = psutil.Process().children(recursive=True)
folder = ray._private.worker._global_node.get_session_dir_path()
log = Path(folder, "logs", "dashboard_agent.log").read_text()
commands = [" ".join(process.cmdline()) for process in processes]
print(json.dumps([commands, log]))
ray.shutdown()
"""


@pytest.mark.soak
def test_private_cluster_starts_no_unused_service(tmp_path: Path) -> None:
    with ray_folder() as folder:
        finished = subprocess.run(
            [sys.executable, "-c", STARTING],
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
            cwd=tmp_path,
            env={**os.environ, "RAY_TMPDIR": folder},
        )
    commands, log = json.loads(finished.stdout.splitlines()[-1])
    everything = "\n".join(commands)
    assert "raylet" in everything
    assert "gcs_server" in everything
    for unused in ("dashboard/dashboard.py", "monitor.py", "log_monitor.py"):
        assert unused not in everything
    assert log
    assert "Get dashboard http address failed" not in log, "it would be logged every second"
