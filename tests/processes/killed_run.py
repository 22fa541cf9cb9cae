"""A run in a separate process group, so that a test can kill all its processes at once.

killed_run.py FOLDER SETTINGS_JSON WORKERS LAYOUT
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from harness import Outcome, run_in_processes

from actors.storage.line_logs import LineLog
from actors.storage.storage import DiskStorage
from pipelines.settings import TrainSettings

PATIENCE_S = 120.0


def run_until_killed(
    folder: Path, settings: TrainSettings, workers: int, layout: str, step: int
) -> list[dict[str, object]]:
    """Train until `step` is committed, then SIGKILL all processes; return the metrics lines."""
    log = LineLog(DiskStorage(folder), "metrics.jsonl")
    arguments = [str(folder), settings.model_dump_json(), str(workers), layout]
    here = Path(__file__).parent
    paths = os.pathsep.join([str(here), str(here.parent), os.environ.get("PYTHONPATH", "")])
    child = subprocess.Popen(
        [sys.executable, __file__, *arguments],
        env={**os.environ, "PYTHONPATH": paths},
        cwd=here.parents[1],
        start_new_session=True,
    )
    try:
        deadline = time.monotonic() + PATIENCE_S
        while not any(line["step"] >= step for line in log.lines()):
            assert child.poll() is None and time.monotonic() < deadline, "the run makes no progress"
            time.sleep(0.01)
    finally:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
    return list(log.lines())


def main(arguments: list[str]) -> Outcome:
    folder, settings_json, workers, layout = arguments
    settings = TrainSettings.model_validate(json.loads(settings_json))
    return run_in_processes(Path(folder), settings, int(workers), layout=layout)


if __name__ == "__main__":
    main(sys.argv[1:])
