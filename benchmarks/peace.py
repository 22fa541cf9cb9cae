"""Benchmark of a run without failures against what it replaces: torchrun DDP and Ray Train.

Whole runs of the three systems train the same recipe of `peers/peace_models.py`, ours with MLflow
on, in alternating blocks (`turns.py`). Two workers fill two cores. With one worker one of the two
cores is free for the processes beside the training.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from elastic_run import elastic_train
from peer_run import SCRIPTS, PeerRun, peer_run, ray_train_peace, torchrun_peace
from processes import Failed
from report import Must, bootstrap_interval, conclude, console, parser, show_table
from turns import (
    RECIPE_ARGUMENTS,
    START_TIMEOUT_S,
    WARM_UP_STEPS,
    Side,
    take_turns,
    wait_for_report,
)

NUM_STEPS = {
    "gpt": {2: 60, 1: 36},
    "gpt_dropout": {2: 50, 1: 32},
    "mlp": {2: 350, 1: 450},
    "conv": {2: 300, 1: 300},
}
"""The steps of a block for each model, by number of workers: about 8 s.

After a stop each process beside the training does at once what was due meanwhile; shorter blocks
would count that more often than it happens."""
WITH_DROPOUT = ("gpt_dropout",)
"""Models whose losses depend on the system, since each draws other random numbers."""
OURS, TORCHRUN, RAY_TRAIN = SYSTEMS = ("ours", "torchrun", "Ray Train")
LARGEST_RATIOS = {2: {TORCHRUN: 1.04, RAY_TRAIN: 1.0}, 1: {TORCHRUN: 1.02}}
"""The largest ratio of our step to that of each system, by number of workers."""
LARGEST_DIFFERENCE = 1e-4


@dataclass(frozen=True)
class Peace:
    """The results of one model and one number of workers."""

    model: str
    num_workers: int
    seconds: dict[str, list[float]]
    """Seconds per step of each system, by round."""
    losses: dict[str, list[float]]
    """The losses of the first steps of each system."""
    num_void: int
    abort_causes: list[str]
    """The causes of the generations that ours aborted, as after a stop or a loss."""

    @property
    def name(self) -> str:
        return f"{self.model}, {self.num_workers} worker{'s' if self.num_workers > 1 else ''}"

    def ratios(self, system: str, reference: str) -> list[float]:
        """The ratios of a system's step to another's, by round."""
        pairs_s = zip(self.seconds[system], self.seconds[reference], strict=True)
        return [system_s / reference_s for system_s, reference_s in pairs_s]

    @property
    def largest_difference(self) -> float:
        """The largest relative difference of our losses and torchrun's."""
        pairs = zip(self.losses[OURS], self.losses[TORCHRUN], strict=True)
        return max(abs(ours - bare) / abs(bare) for ours, bare in pairs)

    def rows(self) -> list[list[str]]:
        rows = []
        for system in SYSTEMS:
            row = [self.model, str(self.num_workers), system, f"{median(self.seconds[system]):.4f}"]
            for reference in (TORCHRUN, RAY_TRAIN):
                is_same = system == reference
                row += ["", ""] if is_same else median_cells(self.ratios(system, reference))
            rows.append(row)
        return rows

    def musts(self) -> list[Must]:
        musts = []
        for reference, bound in LARGEST_RATIOS[self.num_workers].items():
            low, _ = bootstrap_interval(self.ratios(OURS, reference))
            what = f"{self.name}: ours / {reference}, low end of the interval"
            musts.append(Must(what, low, bound, ""))
        if self.model not in WITH_DROPOUT:
            what = f"{self.name}: losses of ours and torchrun differ by"
            musts.append(Must(what, self.largest_difference, LARGEST_DIFFERENCE, ""))
        return musts


def median_cells(values: list[float]) -> list[str]:
    """The median and its 95 % interval as cells of the table."""
    low, high = bootstrap_interval(values)
    return [f"{median(values):.3f}", f"{low:.3f} to {high:.3f}"]


def measure(model: str, num_workers: int, num_blocks: int, num_steps: int, log_every: int) -> Peace:
    """Start the three systems, and alternate their blocks."""
    recipe = f"{SCRIPTS / 'peace_models.py'}:{model}"
    layout = "--workers", str(num_workers), "--layout", f"dp={num_workers}"
    peers = [make(num_workers, model, log_every) for make in (torchrun_peace, ray_train_peace)]
    with ExitStack() as stack:
        storage = Path(stack.enter_context(TemporaryDirectory(prefix="peace-")))
        ours = stack.enter_context(elastic_train(storage, recipe, [*layout, *RECIPE_ARGUMENTS]))
        ours.wait_for_world(num_workers, WARM_UP_STEPS, START_TIMEOUT_S)
        peer_runs = [stack.enter_context(peer_run(peer)) for peer in peers]
        for run in peer_runs:
            wait_for_peer(run)
        wait_for_report(ours)
        sides = [Side(ours, lambda: ours.metrics, ours.program.freeze()), *map(side_of, peer_runs)]
        rounds_s = take_turns(sides, num_blocks, num_steps)
        abort_causes = [line["cause"] for line in ours.lines_of("Abort")]
        losses = [[line["loss"] for line in side.lines()[:WARM_UP_STEPS]] for side in sides]
    if not rounds_s:
        raise Failed(f"{model}: blocks of {num_steps} steps take too long: give fewer --steps")
    return Peace(
        model,
        num_workers,
        dict(zip(SYSTEMS, map(list, zip(*rounds_s, strict=True)), strict=True)),
        dict(zip(SYSTEMS, losses, strict=True)),
        num_blocks - len(rounds_s),
        abort_causes,
    )


def wait_for_peer(run: PeerRun) -> None:
    run.wait_until(lambda: len(run.steps) >= WARM_UP_STEPS, START_TIMEOUT_S, "the first steps")


def side_of(run: PeerRun) -> Side:
    return Side(run, lambda: run.steps, run.program.freeze())


def use_cores(number: int) -> None:
    """Let this process and all that it starts use only `number` cores. Raises `Failed`."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < number:
        raise Failed(f"--cores {number}: this machine has {len(cores)}")
    os.sched_setaffinity(0, cores[:number])


def show(results: Sequence[Peace], num_blocks: int, num_cores: int) -> None:
    columns = ["model", "workers", "system", "s/step"]
    for reference in (TORCHRUN, RAY_TRAIN):
        columns += [f"to {reference}", "95 % interval"]
    rows = [row for result in results for row in result.rows()]
    title = "steps, and their ratios to those of torchrun and Ray Train"
    show_table(f"{num_blocks} blocks on {num_cores} cores: {title}", columns, rows)
    for result in results:
        if result.num_void:
            console.print(f"{result.name}: rounds skipped for a long block: {result.num_void}")
        for cause in result.abort_causes:
            console.print(f"{result.name}: ours aborted a generation: {cause}")


def main() -> int:
    models = [*NUM_STEPS]
    arguments = parser(__doc__.splitlines()[0])
    arguments.add_argument("--models", nargs="+", choices=models, default=models)
    arguments.add_argument("--workers", nargs="+", type=int, choices=(2, 1), default=(2, 1))
    arguments.add_argument("--cores", type=int, default=2, help="cores that all processes share")
    arguments.add_argument("--blocks", type=int, default=8, help="blocks of each system")
    arguments.add_argument("--steps", type=int, help="steps in a block; default: by model")
    arguments.add_argument("--log-every", type=int, default=50, help="steps between peers' reports")
    options = arguments.parse_args()
    use_cores(options.cores)
    results = []
    for num_workers in options.workers:
        for model in options.models:
            sizes = (
                options.blocks,
                options.steps or NUM_STEPS[model][num_workers],
                options.log_every,
            )
            results.append(measure(model, num_workers, *sizes))
            console.print(f"measured: {results[-1].name}")
    show(results, options.blocks, options.cores)
    return conclude([must for result in results for must in result.musts()], options.check)


if __name__ == "__main__":
    sys.exit(main())
