"""Comparison of systems that train the same model in alternating blocks of a few steps.

All processes of the other systems are stopped (SIGSTOP) while one trains for a block. So the noise
of the machine affects all equally, and the cost of our controller, Ray and MLflow falls into our
blocks. A block counts from `SKIPPED_S` after the stop: until then every timer that has expired
fires at once. Nor does the start count: MLflow's database is created, and its first report drawn,
before the first block.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import psutil
from elastic_run import ElasticRun, elastic_train
from peer_run import Peer, PeerRun, bare_loop, peer_run
from processes import thaw
from report import bootstrap_interval, console, show_table

from elastic.geometry.layout import Layout
from pipelines.observe.history.run_folder import RECIPE, TIMELINE
from pipelines.run.sweep import UNDISTURBED

WARM_UP_STEPS = 10
START_TIMEOUT_S = 180.0
SKIPPED_S = 0.3
LONGEST_STOP_S = 40.0
"""All runs train on after a stop of this length; longer ones were not tried."""
RECIPE_ARGUMENTS = tuple(word for setting in UNDISTURBED for word in ("--set", setting))


@dataclass
class Side:
    """One of the systems, frozen between its blocks."""

    run: ElasticRun | PeerRun
    lines: Callable[[], list[dict[str, Any]]]
    frozen: list[psutil.Process]

    def block(self, num_steps: int, longest_s: float) -> float | None:
        """Train `num_steps` complete steps; return the seconds per step, or None if that takes
        longer than `longest_s`."""
        thawed_at = thaw(self.frozen)

        def times() -> list[float]:
            recent = self.lines()[-2 * num_steps - 100 :]
            return [line["time"] for line in recent if line["time"] > thawed_at + SKIPPED_S]

        def is_over() -> bool:
            return len(times()) > num_steps or time.time() - thawed_at > longest_s

        self.run.wait_until(is_over, START_TIMEOUT_S, f"a block of {num_steps} steps")
        self.frozen = self.run.program.freeze()
        stamps = times()
        if len(stamps) <= num_steps:
            return None
        return (stamps[num_steps] - stamps[0]) / num_steps


@dataclass(frozen=True)
class Comparison:
    """The results of the blocks; `losses` are those of the first steps of both systems."""

    title: str
    pairs_s: list[tuple[float, float]]
    """Seconds per step of ours and of the bare loop, by pair of blocks."""
    losses: list[tuple[float, float]]
    num_void: int = 0
    num_aborts: int = 0

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % interval of the median ratio."""
        return bootstrap_interval([ours / bare for ours, bare in self.pairs_s])

    @property
    def largest_difference(self) -> float:
        """The largest relative difference of the first steps' losses."""
        return max(abs(ours - bare) / abs(bare) for ours, bare in self.losses)

    def show(self) -> None:
        low, high = self.interval
        rows = [
            ["ours", f"{median(ours for ours, _ in self.pairs_s):.4f}"],
            ["bare", f"{median(bare for _, bare in self.pairs_s):.4f}"],
            ["ratio, median of the pairs", f"{median(o / b for o, b in self.pairs_s):.4f}"],
            ["its 95 % interval", f"{low:.4f} to {high:.4f}"],
        ]
        show_table(self.title, ["step", "s"], rows)
        if self.num_void:
            console.print(f"{self.num_void} pairs skipped: a block took over {LONGEST_STOP_S} s")
        if self.num_aborts:
            console.print(f"ours aborted {self.num_aborts} generations, as after a stop or a loss")


def compare(
    layout: str, script: str, changes: Sequence[str], num_blocks: int, num_steps: int
) -> Comparison:
    """Compare `elastic train byte_lm` with these arguments to a bare loop of `peers/`."""
    num_workers = Layout.parse(layout).num_workers
    arguments = ["--workers", str(num_workers), "--layout", layout, *RECIPE_ARGUMENTS, *changes]
    arguments += ["--set", "pass_samples=1"]  # the bare loop merges no microbatches either
    with TemporaryDirectory(prefix="overhead-") as name:
        storage = Path(name)
        with elastic_train(storage, "byte_lm", arguments) as ours:

            def bare() -> Peer:
                return bare_loop(script, ours.folder.path / RECIPE, num_workers)

            title = f"byte_lm, {layout}, {num_blocks} blocks of {num_steps} steps each, {script}.py"
            return side_by_side(title, ours, num_workers, bare, num_blocks, num_steps)


def side_by_side(
    title: str,
    ours: ElasticRun,
    num_workers: int,
    bare_of: Callable[[], Peer],
    num_blocks: int,
    num_steps: int,
) -> Comparison:
    """Alternate blocks of our run, which has just started, and of a bare loop; the order within a
    pair changes from pair to pair."""
    ours.wait_for_world(num_workers, WARM_UP_STEPS, START_TIMEOUT_S)
    wait_for_report(ours)
    with peer_run(bare_of()) as bare:
        bare.wait_until(
            lambda: len(bare.steps) >= WARM_UP_STEPS, START_TIMEOUT_S, "the first steps"
        )
        sides = (
            Side(ours, lambda: ours.metrics, ours.program.freeze()),
            Side(bare, lambda: bare.steps, bare.program.freeze()),
        )
        pairs_s = [(ours_s, bare_s) for ours_s, bare_s in take_turns(sides, num_blocks, num_steps)]
        num_aborts = len(ours.lines_of("Abort"))
        losses = [
            (our_line["loss"], bare_line["loss"])
            for our_line, bare_line in zip(ours.metrics, bare.steps, strict=False)
        ][:WARM_UP_STEPS]
    return Comparison(title, pairs_s, losses, num_blocks - len(pairs_s), num_aborts)


def wait_for_report(run: ElasticRun) -> None:
    """Wait until MLflow has the run and its first report."""
    run.wait_until((run.folder.path / TIMELINE).exists, START_TIMEOUT_S, "the first report")


def take_turns(sides: Sequence[Side], num_blocks: int, num_steps: int) -> list[tuple[float, ...]]:
    """Rounds with a block of each side: seconds per step, in the order of `sides`.

    The order rotates from round to round. A block may take so long that the other blocks of a round
    stop a system for at most `LONGEST_STOP_S`; rounds with a longer block are skipped.
    """
    longest_s = LONGEST_STOP_S / (len(sides) - 1)
    rounds_s = []
    for number in range(num_blocks):
        times_s: list[float | None] = [None] * len(sides)
        for position in range(len(sides)):
            index = (position - number) % len(sides)
            times_s[index] = sides[index].block(num_steps, longest_s)
        complete = tuple(time_s for time_s in times_s if time_s is not None)
        if len(complete) == len(sides):
            rounds_s.append(complete)
    return rounds_s
