"""What a step costs with elasticity, the vote, the report and MLflow on, against a bare FSDP2 loop.

Both systems live side by side, all processes of the one stopped (SIGSTOP) while the other trains
for a block of a few steps, in turns. So the noise of the machine strikes both alike, and whatever
ours does beside the training (controller, Ray, MLflow) is paid for in its own blocks. The first
step of a block, which was cut by the stop, is not counted.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import psutil
from elastic_run import ElasticRun, elastic_train
from peer_run import PeerRun, bare_fsdp2, peer_run
from processes import thaw
from report import Must, bootstrap_interval, conclude, console, parser, show_table

NUM_WORKERS = 4
WARM_UP_STEPS = 10
START_TIMEOUT_S = 180.0
BLOCK_TIMEOUT_S = 60.0
RECIPE_ARGUMENTS = ["--set", "eval_every=0", "--set", "checkpoint_every=0"]


@dataclass
class Side:
    """One of the two systems, frozen between its blocks."""

    run: ElasticRun | PeerRun
    lines: Callable[[], list[dict[str, Any]]]
    frozen: list[psutil.Process]

    def block(self, num_steps: int) -> float:
        """Train so many whole steps; return the seconds that one took."""
        thawed = thaw(self.frozen)
        times: list[float] = []

        def done() -> bool:
            times[:] = [line["time"] for line in self.lines()[-2 * num_steps - 4 :]]
            times[:] = [time for time in times if time > thawed]
            return len(times) > num_steps

        self.run.wait_until(done, BLOCK_TIMEOUT_S, f"a block of {num_steps} steps")
        self.frozen = self.run.program.freeze()
        return (times[num_steps] - times[0]) / num_steps


@dataclass(frozen=True)
class Comparison:
    ours_s: list[float]
    bare_s: list[float]
    num_aborts: int

    @property
    def ratios(self) -> list[float]:
        return [ours / bare for ours, bare in zip(self.ours_s, self.bare_s, strict=True)]


def compare(layout: str, data: str, num_blocks: int, num_steps: int) -> Comparison:
    """Blocks of both, in turns; which of the two begins a pair changes from pair to pair."""
    arguments = ["--workers", str(NUM_WORKERS), "--layout", layout, *RECIPE_ARGUMENTS]
    arguments += ["--data", data]
    with TemporaryDirectory(prefix="overhead-") as name:
        storage = Path(name)
        with elastic_train(storage, "byte_lm", arguments) as ours:
            ours.wait_for_world(NUM_WORKERS, WARM_UP_STEPS, START_TIMEOUT_S)
            with peer_run(bare_fsdp2(ours.folder.recipe)) as bare:
                bare.wait_until(
                    lambda: len(bare.steps) >= WARM_UP_STEPS, START_TIMEOUT_S, "the first steps"
                )
                sides = (
                    Side(ours, lambda: ours.metrics, ours.program.freeze()),
                    Side(bare, lambda: bare.steps, bare.program.freeze()),
                )
                times_s: tuple[list[float], list[float]] = ([], [])
                for number in range(num_blocks):
                    for which in (0, 1) if number % 2 else (1, 0):
                        times_s[which].append(sides[which].block(num_steps))
                return Comparison(*times_s, len(ours.told("Abort")))


def main() -> int:
    arguments = parser(__doc__.splitlines()[0])
    arguments.add_argument("--blocks", type=int, default=60, help="of each system")
    arguments.add_argument("--steps", type=int, default=3, help="in a block")
    arguments.add_argument("--layout", default="fsdp=4")
    arguments.add_argument("--data", default="")
    options = arguments.parse_args()
    result = compare(options.layout, options.data, options.blocks, options.steps)
    low, high = bootstrap_interval(result.ratios)
    ratio = median(result.ratios)
    rows = [
        ["ours", f"{median(result.ours_s):.4f}"],
        ["bare torchrun + FSDP2", f"{median(result.bare_s):.4f}"],
        ["ratio, median of the pairs", f"{ratio:.4f}"],
        ["its 95 % interval", f"{low:.4f} to {high:.4f}"],
    ]
    title = f"byte_lm, {options.layout}, {options.blocks} blocks of {options.steps} steps each"
    show_table(title, ["step", "s"], rows)
    if result.num_aborts:
        console.print(f"ours broke off {result.num_aborts} times, as after a stop or a loss")
    return conclude([Must("low end of the ratio's interval", low, 1.02, "")], options.check)


if __name__ == "__main__":
    sys.exit(main())
