"""Benchmark of the time from SIGKILL of a worker to the next newly committed step, against peers.

All systems train the same multi-layer perceptron of 2.1 M parameters with the same batch, on 4 CPU
workers with one thread each. The time ends when the recovered workers commit the first step beyond
all committed ones. A step from before the kill that the survivors complete does not count.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from elastic_run import ElasticRun, elastic_train
from peer_run import PEERS, RAY_TRAIN, TORCHRUN, Peer, PeerRun, peer_run
from processes import kill
from report import Must, conclude, console, parser, show_table

NUM_WORKERS = 4
STABLE_STEPS = 8
"""Undisturbed steps before the next kill."""
KILL_PHASE = 5
"""Peers are killed halfway between two of their checkpoints."""
START_TIMEOUT_S = 120.0
RECOVERY_TIMEOUT_S = 330.0
"""Longer than a group's timeout: the controller waits that long for a hanging survivor that holds
the only copy of a shard."""
MAX_DETECTION_S = 0.05
"""From SIGKILL to `Abort`: the end of a process is detected, not inferred from a timeout."""
PARTS = ("detect", "abort", "form, build", "reshard", "first step")


@dataclass(frozen=True)
class Recovery:
    seconds: float
    num_redone: int
    parts_s: tuple[float, ...] = ()


@dataclass(frozen=True)
class Result:
    name: str
    settings: str
    recoveries: list[Recovery] = field(default_factory=list)

    @property
    def median_s(self) -> float:
        return median(recovery.seconds for recovery in self.recoveries)

    @property
    def detection_s(self) -> float:
        return median(recovery.parts_s[0] for recovery in self.recoveries)

    @property
    def most_redone(self) -> int:
        return max(recovery.num_redone for recovery in self.recoveries)


def measure_ours(layout: str, num_kills: int) -> Result:
    """Kill one worker after the other, each time after all workers are back."""
    result = Result(f"ours, {layout}", "MLflow on, no checkpoints")
    arguments = ["--workers", str(NUM_WORKERS), "--layout", layout]
    with (
        TemporaryDirectory(prefix="recovery-") as name,
        elastic_train(Path(name), "mlp", arguments) as run,
    ):
        for number in range(num_kills):
            result.recoveries.append(kill_ours(run, number))
    return result


def kill_ours(run: ElasticRun, number: int) -> Recovery:
    """Kill a member after all have joined, another each time; wait for the next new step."""
    generation = run.wait_for_world(NUM_WORKERS, STABLE_STEPS, START_TIMEOUT_S)
    victim = run.members()[-1 - number % NUM_WORKERS]
    killed_at = kill(run.pid(victim))

    def recovered() -> bool:
        return run.metrics[-1]["generation"] > generation

    run.wait_until(recovered, RECOVERY_TIMEOUT_S, f"recovery from the loss of {victim}")
    highest = max(line["step"] for line in run.metrics if line["generation"] <= generation)
    run.wait_until(
        lambda: run.metrics[-1]["step"] > highest, RECOVERY_TIMEOUT_S, f"step {highest + 1}"
    )
    after = [line for line in run.metrics if line["generation"] > generation]
    first = next(line for line in after if line["step"] > highest)
    return Recovery(first["time"] - killed_at, after.index(first), _parts(run, killed_at, first))


def _parts(run: ElasticRun, killed_at: float, first: dict[str, Any]) -> tuple[float, ...]:
    """The time of each phase by the journal's clock; `PARTS` names them."""
    generation = first["generation"]
    aborted = next(line["time"] for line in run.lines_of("Abort") if line["time"] >= killed_at)
    formed, resharded, resumed = (
        next(line["time"] for line in run.lines_of(kind) if line["generation"] == generation)
        for kind in ("Form", "Reshard", "Resume")
    )
    moments = (killed_at, aborted, formed, resharded, resumed, first["time"])
    return tuple(after - before for before, after in pairwise(moments))


def measure_peer(peer: Peer, num_kills: int) -> Result:
    result = Result(peer.name, peer.settings)
    with peer_run(peer) as run:
        for number in range(num_kills):
            result.recoveries.append(_kill_peer(run, number))
    return result


def _kill_peer(run: PeerRun, number: int) -> Recovery:
    def is_stable() -> bool:
        if not run.steps or run.steps[-1]["world_size"] != NUM_WORKERS:
            return False
        last = run.steps[-1]
        recent = run.steps[-STABLE_STEPS:]
        is_same_attempt = len(recent) == STABLE_STEPS and recent[0]["attempt"] == last["attempt"]
        return is_same_attempt and last["step"] % 10 == KILL_PHASE

    run.wait_until(is_stable, START_TIMEOUT_S, f"{STABLE_STEPS} steps of {NUM_WORKERS} workers")
    attempt, num_before = run.steps[-1]["attempt"], len(run.steps)
    killed_at = kill(run.pid(NUM_WORKERS - 1 - number % NUM_WORKERS))

    def new_steps() -> list[int]:
        """The indices of new steps among the lines after the recovery."""
        highest = max(line["step"] for line in run.steps if line["attempt"] == attempt)
        return [i for i, line in enumerate(recovered()) if line["step"] > highest]

    def recovered() -> list[dict[str, Any]]:
        return [line for line in run.steps[num_before:] if line["attempt"] != attempt]

    run.wait_until(lambda: bool(new_steps()), RECOVERY_TIMEOUT_S, "recovery")
    num_redone = new_steps()[0]
    return Recovery(recovered()[num_redone]["time"] - killed_at, num_redone)


def show(results: Sequence[Result]) -> None:
    rows = [
        [
            result.name,
            f"{result.median_s:.2f}",
            " ".join(f"{recovery.seconds:.2f}" for recovery in result.recoveries),
            str(result.most_redone),
            result.settings,
        ]
        for result in results
    ]
    columns = ("system", "median s", "each s", "steps redone (most)", "settings")
    show_table("SIGKILL to the next newly committed step", columns, rows)
    rows = [
        [result.name, *(f"{median(part) * 1000:.0f}" for part in zip(*parts, strict=True))]
        for result in results
        if all(parts := [recovery.parts_s for recovery in result.recoveries])
    ]
    if rows:
        show_table("where our time goes, median ms", ("system", *PARTS), rows)


def musts(results: Sequence[Result]) -> list[Must]:
    ours = [result for result in results if result.name.startswith("ours")]
    bounds = []
    for result in ours:
        bounds.append(Must(f"{result.name}, time", result.median_s, 0.5))
        bounds.append(Must(f"{result.name}, detection", result.detection_s, MAX_DETECTION_S))
        bounds.append(Must(f"{result.name}, steps redone", result.most_redone, 0, "steps"))
    for peer, factor in ((TORCHRUN, 8), (RAY_TRAIN, 20)):
        for result in results:
            if result.name == peer.name and ours:
                ratio = result.median_s / max(our_result.median_s for our_result in ours)
                bounds.append(Must(f"{peer.name} against our slower", ratio, factor, "times", True))
    return bounds


def main() -> int:
    systems: dict[str, Callable[[int], Result]] = {
        "dp": lambda num_kills: measure_ours("dp=4", num_kills),
        "hsdp": lambda num_kills: measure_ours("dp=2,fsdp=2", num_kills),
        **{peer.key: lambda num_kills, peer=peer: measure_peer(peer, num_kills) for peer in PEERS},
    }
    arguments = parser(__doc__.splitlines()[0])
    arguments.add_argument("--kills", type=int, default=5)
    arguments.add_argument("--systems", nargs="+", choices=systems, default=list(systems))
    options = arguments.parse_args()
    missing = [p for p in PEERS if p.key in options.systems and not p.is_installed]
    for peer in missing:
        console.print(f"{peer.name} is not installed: skipped")
    chosen = [key for key in options.systems if key not in {peer.key for peer in missing}]
    results = []
    for key in chosen:
        console.print(f"measuring {key} ...")
        results.append(systems[key](options.kills))
    show(results)
    return conclude(musts(results), options.check)


if __name__ == "__main__":
    sys.exit(main())
