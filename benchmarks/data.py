"""Benchmark of reading: samples that take 4 ms, against torchrun with the same `DataLoader`.

Two workers with two readers each train the recipes of `peers/data_models.py` in alternating blocks
with torchrun DDP (`turns.py`). The share of the time for which training has waited for data comes
from `system.jsonl`; it is also measured for token shards, which the training thread reads.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from elastic_run import ElasticRun, elastic_train
from peer_run import SCRIPTS, Peer, peer_run, torchrun
from report import Must, bootstrap_interval, conclude, parser, show_table
from turns import RECIPE_ARGUMENTS, START_TIMEOUT_S, WARM_UP_STEPS, Side, take_turns

from pipelines.observe.history.run_folder import Tail

NUM_WORKERS = 2
LAYOUT = ("--workers", str(NUM_WORKERS), "--layout", f"dp={NUM_WORKERS}")
SMALLEST_RATIO = {"decoded": 0.95, "awaited": 0.98}
"""The least throughput of ours, as a share of torchrun's."""
LARGEST_WAIT = 0.01
READERS_SUFFICE = ("hidden", "byte_lm")
"""Where the readers are faster than training."""
NUM_STEPS = {"decoded": 90, "awaited": 230}
"""The steps of a block of about 8 s: many more than passes are read ahead, and so many that what a
run does periodically does not all fall into its blocks."""
MEASURED_S = 30.0


@dataclass(frozen=True)
class Row:
    name: str
    rounds_s: Sequence[tuple[float, ...]]
    """Seconds per step of ours and of torchrun, by round; empty without a comparison."""
    wait: float
    """The share of the time for which our training waits for data."""

    @property
    def throughputs(self) -> list[float]:
        return [bare_s / ours_s for ours_s, bare_s in self.rounds_s]

    def cells(self) -> list[str]:
        if not self.rounds_s:
            return [self.name, "", "", "", "", f"{self.wait:.2%}"]
        low, high = bootstrap_interval(self.throughputs)
        ours_s, bare_s = (f"{median(side):.4f}" for side in zip(*self.rounds_s, strict=True))
        interval = f"{low:.3f} to {high:.3f}"
        ratio = f"{median(self.throughputs):.3f}"
        return [self.name, ours_s, bare_s, ratio, interval, f"{self.wait:.2%}"]

    def musts(self) -> list[Must]:
        musts = []
        if self.rounds_s:
            _, high = bootstrap_interval(self.throughputs)
            what = f"{self.name}: throughput against torchrun, high end of the interval"
            musts.append(Must(what, high, SMALLEST_RATIO[self.name], "", at_least=True))
        if self.name in READERS_SUFFICE:
            musts.append(Must(f"{self.name}: share of waiting", self.wait, LARGEST_WAIT, ""))
        return musts


def torchrun_data(model: str) -> Peer:
    path = str(SCRIPTS / "torchrun_data.py")
    return Peer(
        "torchrun",
        "torchrun DDP",
        "DataLoader with two workers",
        "torch",
        lambda folder: torchrun(path, str(folder), model, num_processes=NUM_WORKERS),
    )


def wait_share(run: ElasticRun) -> float:
    """The largest share of waiting among the workers, between two samples of each."""
    samples = Tail(run.folder.system)
    lines = list(samples.drain())

    def by_worker() -> dict[str, list[tuple[float, float]]]:
        lines.extend(samples.drain())
        waits: dict[str, list[tuple[float, float]]] = {}
        for line in lines:
            waits.setdefault(line["worker"], []).append((line["time"], line["data_wait_s"]))
        return waits

    begin = max(time_s for waits in by_worker().values() for time_s, _ in waits)

    def is_measured() -> bool:
        later = [[t for t, _ in waits if t > begin] for waits in by_worker().values()]
        return all(times and times[-1] - times[0] >= MEASURED_S for times in later)

    run.wait_until(is_measured, START_TIMEOUT_S, "samples of the workers")
    shares = []
    for waits in by_worker().values():
        (first, waited), *_, (last, waited_at_last) = [w for w in waits if w[0] > begin]
        shares.append((waited_at_last - waited) / (last - first))
    return max(shares)


def measure(model: str, num_blocks: int) -> Row:
    recipe = f"{SCRIPTS / 'data_models.py'}:{model}"
    with TemporaryDirectory(prefix="data-") as name:
        arguments = [*LAYOUT, *RECIPE_ARGUMENTS]
        with elastic_train(Path(name), recipe, arguments) as ours:
            ours.wait_for_world(NUM_WORKERS, WARM_UP_STEPS, START_TIMEOUT_S)
            wait = wait_share(ours)
            with peer_run(torchrun_data(model)) as bare:
                bare.wait_until(
                    lambda: len(bare.steps) >= WARM_UP_STEPS, START_TIMEOUT_S, "the first steps"
                )
                sides = (
                    Side(ours, lambda: ours.metrics, ours.program.freeze()),
                    Side(bare, lambda: bare.steps, bare.program.freeze()),
                )
                return Row(model, take_turns(sides, num_blocks, NUM_STEPS[model]), wait)


def measure_alone(name: str, recipe: str) -> Row:
    """Measure only how long training waits."""
    with TemporaryDirectory(prefix="data-") as folder:
        arguments = [*LAYOUT, *RECIPE_ARGUMENTS]
        with elastic_train(Path(folder), recipe, arguments) as ours:
            ours.wait_for_world(NUM_WORKERS, WARM_UP_STEPS, START_TIMEOUT_S)
            return Row(name, [], wait_share(ours))


def main() -> int:
    arguments = parser(__doc__.splitlines()[0])
    arguments.add_argument("--blocks", type=int, default=12, help="blocks of each system")
    options = arguments.parse_args()
    rows = [measure(model, options.blocks) for model in SMALLEST_RATIO]
    rows.append(measure_alone("hidden", f"{SCRIPTS / 'data_models.py'}:hidden"))
    rows.append(measure_alone("byte_lm", "byte_lm"))
    columns = ["samples", "ours, s a step", "torchrun", "throughput", "95 % interval", "waiting"]
    show_table("two workers, two readers each", columns, [row.cells() for row in rows])
    return conclude([must for row in rows for must in row.musts()], options.check)


if __name__ == "__main__":
    sys.exit(main())
