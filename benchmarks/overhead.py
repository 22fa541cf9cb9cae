"""What a step costs with elasticity, the vote, the report and MLflow on, against a bare FSDP2 loop.

Both systems live side by side, all processes of the one stopped (SIGSTOP) while the other trains
for a block of a few steps, in turns. So the noise of the machine strikes both alike, and whatever
ours does beside the training (controller, Ray, MLflow) is paid for in its own blocks. The first
step of a block, which was cut by the stop, is not counted.
"""

from __future__ import annotations

import sys
import time
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
LONGEST_BLOCK_S = 6.0
"""A run whose processes are all stopped for longer takes its driver for dead."""
RECIPE_ARGUMENTS = ["--set", "eval_every=0", "--set", "checkpoint_every=0"]


@dataclass
class Side:
    """One of the two systems, frozen between its blocks."""

    run: ElasticRun | PeerRun
    lines: Callable[[], list[dict[str, Any]]]
    frozen: list[psutil.Process]

    def block(self, num_steps: int) -> float | None:
        """Train so many whole steps; return the seconds that one took, or None if that would
        stop the other side for too long."""
        thawed = thaw(self.frozen)

        def times() -> list[float]:
            recent = self.lines()[-2 * num_steps - 4 :]
            return [line["time"] for line in recent if line["time"] > thawed]

        def over() -> bool:
            return len(times()) > num_steps or time.time() - thawed > LONGEST_BLOCK_S

        self.run.wait_until(over, START_TIMEOUT_S, f"a block of {num_steps} steps")
        self.frozen = self.run.program.freeze()
        stamps = times()
        if len(stamps) <= num_steps:
            return None
        return (stamps[num_steps] - stamps[0]) / num_steps


@dataclass(frozen=True)
class Comparison:
    pairs_s: list[tuple[float, float]]
    """Seconds a step of ours and of the bare loop took, in blocks side by side."""
    num_void: int
    num_aborts: int

    @property
    def ratios(self) -> list[float]:
        return [ours / bare for ours, bare in self.pairs_s]


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
                pairs_s = take_turns(sides, num_blocks, num_steps)
                num_aborts = len(ours.told("Abort"))
    return Comparison(pairs_s, num_blocks - len(pairs_s), num_aborts)


def take_turns(
    sides: tuple[Side, Side], num_blocks: int, num_steps: int
) -> list[tuple[float, float]]:
    """Pairs of blocks, without those of which one was too long."""
    pairs_s = []
    for number in range(num_blocks):
        times_s: list[float | None] = [None, None]
        for which in (0, 1) if number % 2 else (1, 0):
            times_s[which] = sides[which].block(num_steps)
        ours_s, bare_s = times_s
        if ours_s is not None and bare_s is not None:
            pairs_s.append((ours_s, bare_s))
    return pairs_s


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
        ["ours", f"{median(ours for ours, _ in result.pairs_s):.4f}"],
        ["bare torchrun + FSDP2", f"{median(bare for _, bare in result.pairs_s):.4f}"],
        ["ratio, median of the pairs", f"{ratio:.4f}"],
        ["its 95 % interval", f"{low:.4f} to {high:.4f}"],
    ]
    title = f"byte_lm, {options.layout}, {options.blocks} blocks of {options.steps} steps each"
    show_table(title, ["step", "s"], rows)
    if result.num_void:
        console.print(f"{result.num_void} pairs left out: a block took over {LONGEST_BLOCK_S} s")
    if result.num_aborts:
        console.print(f"ours broke off {result.num_aborts} times, as after a stop or a loss")
    return conclude([Must("low end of the ratio's interval", low, 1.02, "")], options.check)


if __name__ == "__main__":
    sys.exit(main())
