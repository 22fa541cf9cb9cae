"""A run in a program of its own, to be killed with all its processes at once.

killed_whole.py FOLDER SETTINGS_JSON WORKERS LAYOUT
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from harness import Outcome, run_plainly

from actors.storage.line_logs import LineLog
from actors.storage.storage import DiskStorage
from pipelines.settings import TrainSettings

PATIENCE_S = 120.0


def run_until_killed(
    folder: Path, settings: TrainSettings, workers: int, layout: str, step: int
) -> list[dict[str, object]]:
    """Train until `step` has been committed, then SIGKILL everything; the lines of the metrics."""
    log = LineLog(DiskStorage(folder), "metrics.jsonl")
    arguments = [str(folder), settings.model_dump_json(), str(workers), layout]
    paths = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    child = subprocess.Popen(
        [sys.executable, __file__, *arguments],
        env={**os.environ, "PYTHONPATH": paths},
        cwd=Path(__file__).parents[2],
        start_new_session=True,
    )
    try:
        deadline = time.monotonic() + PATIENCE_S
        while not any(line["step"] >= step for line in log.lines()):
            assert child.poll() is None and time.monotonic() < deadline, "it does not get on"
            time.sleep(0.01)
    finally:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
    return list(log.lines())


def main(arguments: list[str]) -> Outcome:
    folder, settings, workers, layout = arguments
    told = TrainSettings.model_validate(json.loads(settings))
    return run_plainly(Path(folder), told, int(workers), layout=layout)


if __name__ == "__main__":
    main(sys.argv[1:])
