"""Benchmark of the time for which a checkpoint blocks the training thread, against DCP.

The peer is a synchronous checkpoint of torch.distributed.checkpoint (DCP) of the same state in the
same run: byte_lm on fsdp=4 in plain processes, both to tmpfs. Ours are made every fourth step,
DCP's between them.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from checkpoint_program import EVERY, NOTES
from elastic_run import ElasticRun
from plain_run import plain_run
from report import Must, conclude, console, parser, show_table
from turns import START_TIMEOUT_S, WARM_UP_STEPS

LAYOUT, NUM_WORKERS = "fsdp=4", 4
TMPFS = "/dev/shm"
CHANGES = (
    f"checkpoint.every={EVERY}",
    "checkpoint.keep_last=1",
    "eval_every=0",
    "snapshot.every=0",
)
STEP_TIMEOUT_S = 60.0


def measure(num_checkpoints: int) -> tuple[ElasticRun, dict[str, list[float]]]:
    """The run, and the stalls of our and of DCP's checkpoints, by checkpoint and worker."""
    with TemporaryDirectory(prefix="checkpoint-", dir=TMPFS) as name:
        folder = Path(name)
        timed = {"program": "checkpoint_program:TimedProgram", "environment": {NOTES: name}}
        with plain_run(folder / "run", "byte_lm", LAYOUT, 1, CHANGES, **timed) as run:
            run.wait_for_world(NUM_WORKERS, WARM_UP_STEPS, START_TIMEOUT_S)
            last = run.metrics[-1]["step"] + EVERY * num_checkpoints
            patience_s = STEP_TIMEOUT_S * EVERY * num_checkpoints
            run.wait_until(lambda: run.metrics[-1]["step"] >= last, patience_s, "the last step")
        stalls: dict[str, list[float]] = {"ours": [], "dcp": []}
        for file in folder.glob("stalls-*.jsonl"):
            for line in map(json.loads, file.read_text().splitlines()):
                stalls[line["kind"]].append(line["seconds"])
        return run, stalls


def gaps(run: ElasticRun) -> dict[str, list[float]]:
    """Seconds between commits: after our checkpoints, across DCP's, and without any."""
    times = {line["step"]: line["time"] for line in run.metrics}
    gaps_s: dict[str, list[float]] = {"ours": [], "dcp": [], "plain": []}
    for step in range(WARM_UP_STEPS + EVERY, max(times)):
        kinds = {1: "ours", EVERY // 2: "dcp"}
        gaps_s[kinds.get((step + 1) % EVERY, "plain")].append(times[step + 1] - times[step])
    return gaps_s


def main() -> int:
    arguments = parser(__doc__.splitlines()[0])
    arguments.add_argument("--checkpoints", type=int, default=25, help="checkpoints of each kind")
    options = arguments.parse_args()
    console.print("measuring ...")
    run, stalls = measure(options.checkpoints)
    between = gaps(run)
    step_s = median(between["plain"])
    state_mb = run.lines_of("RunOpened")[0]["job"]["state_bytes"] / 1e6
    rows = [
        [
            kind,
            str(len(stalls[kind]) // NUM_WORKERS),
            f"{1000 * median(stalls[kind]):.2f}",
            f"{1000 * max(stalls[kind]):.1f}",
            f"{100 * median(stalls[kind]) / step_s:.2f} %",
            f"{1000 * (median(between[kind]) - step_s):.0f}",
        ]
        for kind in ("ours", "dcp")
    ]
    columns = ("checkpoint", "number", "stall ms", "longest ms", "of a step", "step longer by ms")
    title = f"byte_lm, {LAYOUT}, {state_mb:.1f} MB of state, a step of {step_s:.3f} s, to tmpfs"
    show_table(title, columns, rows)
    factor = median(stalls["dcp"]) / median(stalls["ours"])
    complete = len(run.lines_of("Checkpointed")) / (len(stalls["ours"]) / NUM_WORKERS)
    return conclude(
        [
            Must("stall, DCP against ours", factor, 20.0, "times", at_least=True),
            Must("stall of ours, of a step", median(stalls["ours"]) / step_s, 0.05, ""),
            Must("share of our checkpoints that completed", complete, 0.9, "", at_least=True),
        ],
        options.check,
    )


if __name__ == "__main__":
    sys.exit(main())
