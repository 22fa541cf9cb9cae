"""What is left of training where a worker is killed every 20 seconds: this project and its peers.

The same multi-layer perceptron as in `recovery.py`, 4 CPU workers. Each system trains in peace
first, and then loses a worker now and then; what it commits in that time is compared with what it
would have committed in peace, at its own speed. Steps that are done again count once.
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


@dataclass(frozen=True)
class Side:
    """A system at work: `read` takes in what it has told, `step` is the highest committed one,
    `pids` are its workers' as far as known, by who they are."""

    name: str
    wait_until: Callable[[Callable[[], bool], float, str], None]
    step: Callable[[], int]
    pids: Callable[[], list[int]]

    def steps_in(self, seconds: float) -> int:
        """How many it commits in so long a time."""
        first, until = self.step(), time.monotonic() + seconds
        self.wait_until(lambda: time.monotonic() >= until, seconds + 1.0, "the time")
        return self.step() - first


@dataclass(frozen=True)
class Result:
    name: str
    settings: str
    in_peace: float
    """Steps a second."""
    churned: float
    num_kills: int

    @property
    def share(self) -> float:
        return self.churned / self.in_peace


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
    in_peace = side.steps_in(calm_s) / calm_s
    num_steps = num_kills = 0
    began = time.monotonic()
    for number in range(round(churn_s / every_s)):
        num_kills += kill_one(side.pids(), number)
        until = began + (number + 1) * every_s
        num_steps += side.steps_in(max(0.0, until - time.monotonic()))
    seconds = time.monotonic() - began
    return Result(side.name, settings, in_peace, num_steps / seconds, num_kills)


def kill_one(pids: list[int], number: int) -> bool:
    """SIGKILL to another worker each time, if any lives that is known."""
    for turn in range(len(pids)):
        try:
            os.kill(pids[-1 - (number + turn) % len(pids)], signal.SIGKILL)
        except ProcessLookupError:
            continue  # it has not come back yet
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


def main() -> int:
    arguments = parser(__doc__.splitlines()[0])
    arguments.add_argument("--calm", type=float, default=30.0, help="seconds in peace")
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
            console.print(f"{peer.name} is not installed: left out")
    rows = [
        [
            result.name,
            f"{result.in_peace:.1f}",
            f"{result.churned:.1f}",
            f"{result.share:.2f}",
            str(result.num_kills),
            result.settings,
        ]
        for result in results
    ]
    columns = ("system", "steps/s in peace", "with kills", "share", "kills", "settings")
    show_table(f"a worker killed every {options.every:g} s", columns, rows)
    ours, *peers = results
    musts = [Must("ours, share of the undisturbed run", ours.share, 0.8, "", True)]
    musts += [
        Must(f"ours against {peer.name}", ours.share / max(peer.share, 1e-9), 2.0, "times", True)
        for peer in peers
    ]
    return conclude(musts, options.check)


if __name__ == "__main__":
    sys.exit(main())
