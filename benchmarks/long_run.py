"""Benchmark of a run of millions of steps: controller restart, `elastic status`, and memory.

The real core and the real journal writer (`tests/long_runs.py`) write the run to a disk. It is
copied segment by segment to the S3 server of the tests. Each measurement is a separate process
(`long_run_child.py`), timed after its imports.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from long_run_child import ACTOR
from report import Must, conclude, parser, show_table

sys.path += [str(Path(__file__).parents[1] / "tests" / name) for name in ("", "processes")]

from long_runs import LongRun
from s3 import start_s3_with_credentials

from actors.controller.compaction import compact_oldest
from actors.storage.lease import claim
from actors.storage.line_logs import LineLog
from actors.storage.line_writers import SEGMENT_BYTES
from actors.storage.segments import segment_name
from actors.storage.storage import Storage, open_storage
from pipelines.observe.history.history_file import load_history
from pipelines.observe.history.run_folder import RunFolder

CHILD = Path(__file__).with_name("long_run_child.py")
NUM_STEPS, NUM_MEMORY_STEPS = 5_000_000, 1_000_000
NUM_TIMES = 3
NAME = "long"
LOGS = ("journal.jsonl", "metrics.jsonl")


def write_run(folder: Path, num_steps: int) -> LongRun:
    """Write the files that a controller and its observer leave behind."""
    run = LongRun(folder, num_steps)
    run.write()
    storage = open_storage(str(folder))
    storage.write("recipe.json", b"{}")
    claim(storage, actor=ACTOR).stop_renewing()
    history = load_history(RunFolder(storage))
    history.follow()
    history.save()
    return run


def copy_to(storage: Storage, folder: Path) -> int:
    """Copy the run to objects; return the number of segments after compaction."""
    for name in LOGS:
        with open(folder / name, "rb") as file:
            begin = 0
            while lines := file.readlines(SEGMENT_BYTES):
                segment = b"".join(lines)
                storage.write(segment_name(name, 1, begin), segment)
                begin += len(segment)
    for name in ("recipe.json", "history.json"):
        storage.write(name, (folder / name).read_bytes())
    claim(storage, actor=ACTOR).stop_renewing()
    for name in LOGS:
        while compact_oldest(LineLog(storage, name), lambda: None, name == LOGS[0]):
            continue
    return sum(len(LineLog(storage, name).segments()) for name in LOGS)


def run_child(*arguments: str) -> dict[str, Any]:
    """Run one measurement. Raises `CalledProcessError` after printing its standard error."""
    command = [sys.executable, str(CHILD), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.stderr.write(done.stderr)
        done.check_returncode()
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def measure(where: str, parent: str, run: str) -> tuple[list[str], list[Must]]:
    """Measure restart and status of a run several times; return a table row and the musts."""
    restarts = [run_child("restart", run) for _ in range(NUM_TIMES)]
    statuses = [run_child("status", parent, NAME) for _ in range(NUM_TIMES)]

    def middle(rows: list[dict[str, Any]], name: str) -> float:
        return median(row[name] for row in rows)

    heard_s, running_s = middle(restarts, "heard_s"), middle(restarts, "running_s")
    status_s = middle(statuses, "status_s")
    cells = [f"{1000 * taken_s:.0f} ms" for taken_s in (heard_s, running_s, status_s)]
    return [where, *cells], [
        Must(f"{where}: controller restart to the first message to a worker", heard_s, 1.0),
        Must(f"{where}: controller restart to the first new step", running_s, 3.0),
        Must(f"{where}: elastic status", status_s, 1.0),
    ]


def time_call(work: Callable[[], Any]) -> tuple[Any, float]:
    began = time.perf_counter()
    return work(), time.perf_counter() - began


def main() -> int:
    arguments = parser((__doc__ or "").splitlines()[0])
    arguments.add_argument("--steps", type=int, default=NUM_STEPS)
    arguments.add_argument("--memory-steps", type=int, default=NUM_MEMORY_STEPS)
    arguments.add_argument("--folder", type=Path, help="keep the written run here and reuse it")
    options = arguments.parse_args()
    with (
        TemporaryDirectory(prefix="elastic-long-run-") as name,
        start_s3_with_credentials() as server,
    ):
        local = options.folder or Path(name)
        written_s = 0.0
        if not (local / NAME / "history.json").exists():
            _, written_s = time_call(lambda: write_run(local / NAME, options.steps))
        sizes = [(local / NAME / log).stat().st_size / options.steps for log in LOGS]
        rows, musts = [], []
        storage = open_storage(server.url).at(NAME)
        num_segments, copied_s = time_call(lambda: copy_to(storage, local / NAME))
        for where, parent, folder in (
            ("disk", str(local), str(local / NAME)),
            ("S3", server.url, storage.url),
        ):
            row, more = measure(where, parent, folder)
            rows.append(row)
            musts += more
        memory = run_child("memory", str(Path(name) / "memory"), str(options.memory_steps))
    columns = ["", "heard", "running", "status"]
    show_table(f"a run of {options.steps:,} steps, one a second", columns, rows)
    facts = [
        ["journal, bytes a step", f"{sizes[0]:.0f}"],
        ["metrics, bytes a step", f"{sizes[1]:.0f}"],
        ["segments on S3 after compaction", f"{num_segments:,}"],
        ["written in, copied in", f"{written_s:.0f} s, {copied_s:.0f} s"],
        ["a step through the shell", f"{memory['step_us']:.0f} us"],
        ["blocks of memory a step", f"{memory['blocks_per_step']:.5f}"],
        ["resident bytes a step", f"{memory['bytes_per_step']:.2f}"],
    ]
    show_table("what it costs", ["", "measured"], facts)
    musts += [
        Must("controller memory, blocks a step", memory["blocks_per_step"], 0.001, ""),
        Must("controller memory, resident bytes a step", memory["bytes_per_step"], 2.0, "bytes"),
    ]
    return conclude(musts, options.check)


if __name__ == "__main__":
    sys.exit(main())
