"""Benchmark of the speed of a run by its number of workers: strong and weak scaling.

Whole runs of a recipe of `peers/peace_models.py` with different numbers of workers, MLflow on,
train in alternating blocks (`turns.py`). Strong: all train the same batch. Weak: the batch grows
with the workers. The time split is that of the runs' own metrics. On a cluster with GPUs (and
`--address`) the workers use GPUs.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from elastic_run import ElasticRun, elastic_train
from peer_run import SCRIPTS
from processes import Failed
from report import Must, conclude, parser, show_table
from turns import (
    RECIPE_ARGUMENTS,
    START_TIMEOUT_S,
    WARM_UP_STEPS,
    Side,
    take_turns,
    wait_for_report,
)

from pipelines.observe.history.step_time import StepTimeAccount

STRONG, WEAK = "strong", "weak"
LARGEST_DIFFERENCE = 1e-4
LONGEST_STEP = 2.0
"""Steps that take so many times longer than the median are not in the time split."""


@dataclass(frozen=True)
class Scale:
    """The results of one number of workers in one kind of scaling."""

    kind: str
    num_workers: int
    batch: int
    seconds: list[float]
    """Seconds per step by round."""
    losses: list[float]
    """Of the first steps."""
    shares: dict[str, float]
    """The parts of the step time."""
    device_flops: float | None
    """Operations per second of a worker, recently."""

    def efficiency(self, one: Scale) -> float:
        """The samples per second of a worker, in relation to those of the run with one worker."""
        ratios = [own / alone for own, alone in zip(self.seconds, one.seconds, strict=True)]
        return self.batch / one.batch / self.num_workers / median(ratios)

    def cells(self, one: Scale) -> list[str]:
        step_s = median(self.seconds)
        flops = "" if self.device_flops is None else f"{self.device_flops / 1e9:,.3g}"
        compute, waits = self.shares["compute"], self.shares["communication"] + self.shares["vote"]
        parts = [f"{share:.0%}" for share in (compute, waits, 1.0 - compute - waits)]
        head = [self.kind, str(self.num_workers), str(self.batch), f"{step_s:.4f}"]
        return [*head, f"{self.batch / step_s:,.0f}", f"{self.efficiency(one):.2f}", flops, *parts]


def measure(
    kind: str, model: str, counts: Sequence[int], batch: int, num_blocks: int, num_steps: int,
    environment: dict[str, str],
) -> list[Scale]:  # fmt: skip
    """Start a run for each number of workers, and alternate their blocks."""
    batches = [batch * (num_workers if kind == WEAK else 1) for num_workers in counts]
    recipe = f"{SCRIPTS / 'peace_models.py'}:{model}"
    with ExitStack() as stack:
        storage = Path(stack.enter_context(TemporaryDirectory(prefix="scaling-")))
        runs = []
        for num_workers, own_batch in zip(counts, batches, strict=True):
            arguments = ["--workers", str(num_workers), "--layout", f"dp={num_workers}"]
            arguments += ["--set", f"batch={own_batch}", "--set", "microbatch=1", *RECIPE_ARGUMENTS]
            folder = storage / str(num_workers)
            run = stack.enter_context(elastic_train(folder, recipe, arguments, environment))
            run.wait_for_world(num_workers, WARM_UP_STEPS, START_TIMEOUT_S)
            wait_for_report(run)
            runs.append((run, run.program.freeze()))
        sides = [Side(run, partial(getattr, run, "metrics"), frozen) for run, frozen in runs]
        rounds_s = take_turns(sides, num_blocks, num_steps)
        if not rounds_s:
            raise Failed(f"blocks of {num_steps} steps take too long: give fewer --steps")
        by_run = [list(times_s) for times_s in zip(*rounds_s, strict=True)]
        return [
            scale_of(kind, num_workers, own_batch, seconds, run)
            for num_workers, own_batch, seconds, (run, _) in zip(
                counts, batches, by_run, runs, strict=True
            )
        ]


def scale_of(
    kind: str, num_workers: int, batch: int, seconds: list[float], run: ElasticRun
) -> Scale:
    account = StepTimeAccount()
    for line in run.journal:
        account.take_ready(line)
    rows = run.metrics[WARM_UP_STEPS:]
    usual_s = median(row["time"] - before["time"] for before, row in pairwise(rows))
    for before, row in pairwise(rows):
        if row["time"] - before["time"] < LONGEST_STEP * usual_s:  # it was not stopped meanwhile
            account.take(row)
    flops = account.device.step_flops
    rate = None if flops is None else flops / median(seconds) / num_workers
    losses = [row["loss"] for row in run.metrics[:WARM_UP_STEPS]]
    return Scale(kind, num_workers, batch, seconds, losses, account.run.shares(), rate)


def loss_must(results: Sequence[Scale]) -> Must:
    """Strong scaling trains the same model with any number of workers."""
    one, *others = (result.losses for result in results)
    largest = max(
        abs(own - alone) / abs(alone)
        for losses in others
        for own, alone in zip(losses, one, strict=True)
    )
    what = "strong: losses of different numbers of workers differ by"
    return Must(what, largest, LARGEST_DIFFERENCE, "")


def main() -> int:
    arguments = parser(__doc__.splitlines()[0])
    arguments.add_argument("--model", default="gpt", help="a recipe of peers/peace_models.py")
    arguments.add_argument("--workers", nargs="+", type=int, default=(1, 2, 3, 4))
    arguments.add_argument("--batch", type=int, default=16, help="weak: a quarter of it a worker")
    arguments.add_argument("--blocks", type=int, default=12, help="blocks of each run")
    arguments.add_argument("--steps", type=int, default=6, help="steps in a block")
    arguments.add_argument("--address", default="local", help="the Ray cluster")
    options = arguments.parse_args()
    if len(options.workers) < 2:
        raise Failed("--workers: give at least two numbers, as in --workers 1 2")
    environment = {"RAY_ADDRESS": options.address}
    sizes = (options.blocks, options.steps, environment)
    rows, musts = [], []
    for kind, batch in ((STRONG, options.batch), (WEAK, max(1, options.batch // 4))):
        results = measure(kind, options.model, options.workers, batch, *sizes)
        rows += [result.cells(results[0]) for result in results]
        musts += [loss_must(results)] if kind == STRONG else []
    columns = ["scaling", "workers", "batch", "s/step", "samples/s", "efficiency", "GFLOP/s"]
    columns += ["compute", "waits", "rest"]
    title = f"{options.model}, {options.blocks} blocks on {len(os.sched_getaffinity(0))} cores"
    show_table(title, columns, rows)
    return conclude(musts, options.check)


if __name__ == "__main__":
    sys.exit(main())
