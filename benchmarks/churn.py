"""Benchmark of the training throughput with a worker killed every 20 seconds, against peers.

It uses the multi-layer perceptron of `recovery.py` and 4 CPU workers. Each system first trains
undisturbed, then with kills; its first half minute does not count. A step that is computed again
counts once.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from elastic_run import ElasticRun, elastic_train
from peer_run import RAY_TRAIN, TORCHRUN, Peer, PeerRun, peer_run
from recovery import NUM_WORKERS, START_TIMEOUT_S
from report import Must, conclude, console, parser, show_table

WARM_UP_STEPS = 30
STANDBY_START_S = 30.0
"""Meanwhile the processes start that will replace killed ones."""
LEAST_RATIOS = {TORCHRUN.name: 1.25, RAY_TRAIN.name: 2.0}
"""The smallest ratio of our steps/s with kills to those of each system."""
LEAST_UNDISTURBED = 0.97
"""The smallest ratio of our undisturbed steps/s to torchrun's."""


@dataclass(frozen=True)
class Side:
    """A running system: `step` returns its highest committed step, `pids` those of its known
    workers, in a fixed order."""

    name: str
    wait_until: Callable[[Callable[[], bool], float, str], None]
    step: Callable[[], int]
    pids: Callable[[], list[int]]

    def steps_in(self, seconds: float) -> int:
        """The number of steps that it commits in this time."""
        first, until = self.step(), time.monotonic() + seconds
        self.wait_until(lambda: time.monotonic() >= until, seconds + 1.0, "the time")
        return self.step() - first


@dataclass(frozen=True)
class Result:
    name: str
    settings: str
    undisturbed: float
    """Steps a second."""
    with_kills: float
    num_kills: int

    @property
    def share(self) -> float:
        return self.with_kills / self.undisturbed


def side_of_ours(run: ElasticRun) -> Side:
    def step() -> int:
        return max((line["step"] for line in run.metrics), default=0)

    return Side("ours", run.wait_until, step, lambda: [run.pid(w) for w in run.members()])


def side_of_peer(peer: Peer, run: PeerRun) -> Side:
    def step() -> int:
        return max((line["step"] for line in run.steps), default=0)

    def pids() -> list[int]:
        return [int(file.read_text()) for file in sorted(run.folder.glob("pid-*"))]

    return Side(peer.name, run.wait_until, step, pids)


def measure(side: Side, settings: str, calm_s: float, churn_s: float, every_s: float) -> Result:
    side.wait_until(lambda: side.step() >= WARM_UP_STEPS, START_TIMEOUT_S, "the first steps")
    side.steps_in(STANDBY_START_S)
    undisturbed = side.steps_in(calm_s) / calm_s
    num_steps = num_kills = 0
    began = time.monotonic()
    for number in range(round(churn_s / every_s)):
        num_kills += kill_one(side.pids(), number)
        until = began + (number + 1) * every_s
        num_steps += side.steps_in(max(0.0, until - time.monotonic()))
    seconds = time.monotonic() - began
    return Result(side.name, settings, undisturbed, num_steps / seconds, num_kills)


def kill_one(pids: list[int], number: int) -> bool:
    """Send SIGKILL to another worker each time; return False if no known worker is alive."""
    for turn in range(len(pids)):
        try:
            os.kill(pids[-1 - (number + turn) % len(pids)], signal.SIGKILL)
        except ProcessLookupError:
            continue  # its replacement has not started yet
        return True
    return False


def measure_ours(layout: str, *times: float) -> Result:
    arguments = ["--workers", str(NUM_WORKERS), "--layout", layout]
    with (
        TemporaryDirectory(prefix="churn-") as name,
        elastic_train(Path(name), "mlp", arguments) as run,
    ):
        run.wait_for_world(NUM_WORKERS, WARM_UP_STEPS, START_TIMEOUT_S)
        return measure(side_of_ours(run), f"{layout}, MLflow on", *times)


def measure_peer(peer: Peer, *times: float) -> Result:
    with peer_run(peer) as run:
        return measure(side_of_peer(peer, run), peer.settings, *times)


def musts_of(ours: Result, *others: Result) -> list[Must]:
    musts = [Must("ours, share of the undisturbed run", ours.share, 0.8, "", True)]
    for other in others:
        what, ratio = f"ours / {other.name}, steps/s with kills", ours.with_kills / other.with_kills
        musts.append(Must(what, ratio, LEAST_RATIOS[other.name], "", True))
        if other.name == TORCHRUN.name:
            what = f"ours / {other.name}, steps/s undisturbed"
            ratio = ours.undisturbed / other.undisturbed
            musts.append(Must(what, ratio, LEAST_UNDISTURBED, "", True))
    return musts


def main() -> int:
    arguments = parser(__doc__.splitlines()[0])
    arguments.add_argument("--calm", type=float, default=30.0, help="seconds without kills")
    arguments.add_argument("--churn", type=float, default=120.0, help="seconds with kills")
    arguments.add_argument("--every", type=float, default=20.0, help="seconds between kills")
    options = arguments.parse_args()
    times = (options.calm, options.churn, options.every)
    console.print("measuring ours ...")
    results = [measure_ours("dp=4", *times)]
    for peer in (TORCHRUN, RAY_TRAIN):
        if peer.is_installed:
            console.print(f"measuring {peer.name} ...")
            results.append(measure_peer(peer, *times))
        else:
            console.print(f"{peer.name} is not installed: skipped")
    rows = [
        [
            result.name,
            f"{result.undisturbed:.1f}",
            f"{result.with_kills:.1f}",
            f"{result.share:.2f}",
            str(result.num_kills),
            result.settings,
        ]
        for result in results
    ]
    columns = ("system", "steps/s undisturbed", "with kills", "share", "kills", "settings")
    show_table(f"a worker killed every {options.every:g} s", columns, rows)
    return conclude(musts_of(*results), options.check)


if __name__ == "__main__":
    sys.exit(main())
