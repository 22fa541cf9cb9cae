"""Benchmark of snapshots: the cost of a step, and recovery against live replicas and checkpoints.

A step of byte_lm with snapshots is compared with one without, on one node, on two, and on four with
parity. Runs are in plain processes, so that neither Ray nor MLflow hides a cost. Steps are compared
as in `turns.py`, recoveries timed as in `recovery.py`.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from elastic_run import ElasticRun
from plain_run import plain_run
from recovery import Recovery, kill_ours
from report import Must, bootstrap_interval, conclude, console, parser, show_table
from turns import START_TIMEOUT_S, WARM_UP_STEPS, Side, take_turns

LAYOUT = "fsdp=4"
NUM_WORKERS = 4
NUM_VERSIONS = 2
COPY = "copy"
PARITY_OF = 3
KINDS = ((1, COPY), (2, COPY), (PARITY_OF + 1, f"xor:{PARITY_OF}"))
"""The number of nodes, and the redundancy between nodes."""
TMPFS = "/dev/shm"
QUIET = ("eval_every=0", "checkpoint.every=0")


@dataclass(frozen=True)
class Cost:
    """Step times with and without snapshots, by pair of blocks, and the servers' counts."""

    num_nodes: int
    redundancy: str
    state_bytes: int
    tokens: int
    pairs_s: list[tuple[float, float]]
    num_snapshots: int
    taken_bytes: int
    received_bytes: int
    memory_bytes: int

    @property
    def where(self) -> str:
        nodes = "one node" if self.num_nodes == 1 else f"{self.num_nodes} nodes"
        return nodes if self.redundancy == COPY else f"{nodes}, {self.redundancy}"

    @property
    def memory_formula(self) -> float:
        """The expected memory in units of the state: the versions of each part, and of its copy or
        of its k-th of parity."""
        elsewhere = 0.0 if self.num_nodes == 1 else 1.0
        return NUM_VERSIONS * (1 + elsewhere / (1 if self.redundancy == COPY else PARITY_OF))

    @property
    def ratios(self) -> list[float]:
        return [with_s / without_s for with_s, without_s in self.pairs_s]

    def states(self, num_bytes: int) -> float:
        """Bytes in units of the state."""
        return num_bytes / self.state_bytes

    def error(self, num_bytes: int) -> float:
        """The relative deviation from one state per snapshot. A worker is killed during the last
        snapshot, so any part of that may exist."""
        expected, actual = self.num_snapshots, self.states(num_bytes)
        return max(expected - actual, actual - (expected + 1), 0.0) / expected


def measure_cost(num_nodes: int, redundancy: str, num_blocks: int, num_steps: int) -> Cost:
    changes = (*QUIET, "snapshot.every=1", f"snapshot.redundancy={redundancy}")
    with (
        TemporaryDirectory(prefix="snapshot-") as name,
        plain_run(Path(name) / "with", "byte_lm", LAYOUT, num_nodes, changes) as ours,
    ):
        wait_until_whole(ours, num_nodes, redundancy)
        frozen = ours.program.freeze()
        with plain_run(
            Path(name) / "without", "byte_lm", LAYOUT, num_nodes, (*QUIET, "snapshot.every=0")
        ) as bare:
            bare.wait_for_world(NUM_WORKERS, WARM_UP_STEPS, START_TIMEOUT_S)
            sides = (
                Side(ours, lambda: ours.metrics, frozen),
                Side(bare, lambda: bare.metrics, bare.program.freeze()),
            )
            pairs_s = take_turns(sides, num_blocks, num_steps)
        for process in sides[0].frozen:
            process.resume()
        return count(ours, num_nodes, redundancy, pairs_s)


def wait_until_whole(run: ElasticRun, num_nodes: int, redundancy: str = COPY) -> None:
    """Wait until each worker's snapshot is complete on all its snapshot servers."""

    def whole() -> bool:
        starts = run.lines_of("StartSnapshots")
        lines = [line for line in starts if line["generation"] == generation]
        if not lines:
            return False
        copies = min(len(servers) for servers in lines[-1]["snapshot_servers"])
        sets = [len(workers) for workers in lines[-1]["sets"]]
        is_placed = copies == min(num_nodes, 2) if redundancy == COPY else sets == [NUM_WORKERS]
        votes = [line["vote"] for line in run.lines_of("StepCommitted")[-1:]]
        return is_placed and votes[0]["num_snapshots"] == NUM_WORKERS

    generation = run.wait_for_world(NUM_WORKERS, WARM_UP_STEPS, START_TIMEOUT_S)
    run.wait_until(whole, START_TIMEOUT_S, "whole snapshots")


def count(
    run: ElasticRun, num_nodes: int, redundancy: str, pairs_s: list[tuple[float, float]]
) -> Cost:
    """Kill a worker at the end and return what the snapshot servers report."""
    kill_ours(run, 0)
    lines = {line["node"]: line for line in run.lines_of("SnapshotServerReported")}
    opened, steps = run.lines_of("RunOpened")[0], run.lines_of("StepCommitted")
    # The journal has the first step of a generation with whole snapshots, the metrics have all.
    first = next(line for line in steps if line["vote"]["num_snapshots"] == NUM_WORKERS)
    whole = [
        line
        for line in run.metrics
        if line["generation"] == first["generation"] and line["step"] >= first["vote"]["step"]
    ]
    return Cost(
        num_nodes,
        redundancy,
        opened["job"]["state_bytes"],
        steps[0]["record"]["tokens"],
        pairs_s,
        len(whole),
        *(
            sum(line[field] for line in lines.values())
            for field in ("taken_bytes", "received_bytes", "memory_bytes")
        ),
    )


def measure_recovery(
    layout: str, source: str, changes: tuple[str, ...], num_kills: int
) -> list[Recovery]:
    """Kill one worker after the other; each time the state must come from `source`."""
    with (
        TemporaryDirectory(prefix="snapshot-", dir=TMPFS) as name,
        plain_run(Path(name), "mlp", layout, 1, changes) as run,
    ):
        recoveries = []
        for number in range(num_kills):
            if source == "snapshot":
                wait_until_whole(run, 1)
            recoveries.append(kill_ours(run, number))
            sources = {line["generation"]: line["source"] for line in run.lines_of("Resharded")}
            killed = run.lines_of("Abort")[-1]["generation"]
            assert sources[min(g for g in sources if g > killed)] == source, sources
    return recoveries


def show_costs(costs: list[Cost]) -> None:
    rows = []
    for cost in costs:
        low, high = bootstrap_interval(cost.ratios)
        rows.append(
            [
                str(cost.num_nodes),
                cost.redundancy if cost.num_nodes > 1 else "",
                f"{cost.state_bytes / 1e6:.1f}",
                f"{cost.tokens:,}",
                f"{median(a for a, _ in cost.pairs_s):.3f}",
                f"{median(b for _, b in cost.pairs_s):.3f}",
                f"{median(cost.ratios):.3f} ({low:.3f} to {high:.3f})",
                str(cost.num_snapshots),
                f"{cost.states(cost.taken_bytes):.2f}",
                f"{cost.states(cost.received_bytes):.2f}",
                f"{cost.memory_bytes / cost.state_bytes:.2f}",
            ]
        )
    columns = ("nodes", "elsewhere", "state MB", "tokens a step", "step s with", "without", "ratio")
    columns += ("snapshots", "copied / state", "sent / state", "memory / state")
    show_table(f"byte_lm, {LAYOUT}, a snapshot every step", columns, rows)


def musts_of(cost: Cost) -> list[Must]:
    low, _ = bootstrap_interval(cost.ratios)
    where, memory = cost.where, cost.memory_bytes / cost.state_bytes / cost.memory_formula
    bounds = [
        Must(f"{where}, low end of the ratio's interval", low, 1.05, ""),
        Must(f"{where}, bytes copied, off", cost.error(cost.taken_bytes), 0.01, ""),
        Must(f"{where}, memory / formula", memory, 1.01, ""),
    ]
    if cost.num_nodes > 1:
        sent = cost.error(cost.received_bytes)
        bounds.append(Must(f"{where}, bytes sent, off", sent, 0.01, ""))
    return bounds


def main() -> int:
    arguments = parser(__doc__.splitlines()[0])
    arguments.add_argument("--blocks", type=int, default=30, help="blocks of each side")
    arguments.add_argument("--steps", type=int, default=3, help="steps in a block")
    arguments.add_argument("--kills", type=int, default=5, help="kills for each kind of recovery")
    options = arguments.parse_args()
    costs = []
    for num_nodes, redundancy in KINDS:
        console.print(f"measuring steps on {num_nodes} node(s), {redundancy} ...")
        costs.append(measure_cost(num_nodes, redundancy, options.blocks, options.steps))
    show_costs(costs)
    kinds = {
        "snapshot": (LAYOUT, (*QUIET, "snapshot.every=1")),
        "live": ("dp=2,fsdp=2", (*QUIET, "snapshot.every=0")),
        "checkpoint": (LAYOUT, ("eval_every=0", "checkpoint.every=1", "snapshot.every=0")),
    }
    times: dict[str, list[Recovery]] = {}
    for source, (layout, changes) in kinds.items():
        console.print(f"measuring recovery: {source} ...")
        times[source] = measure_recovery(layout, source, changes, options.kills)
    medians = {kind: median(r.seconds for r in recoveries) for kind, recoveries in times.items()}
    rows = [
        [
            kind,
            kinds[kind][0],
            f"{medians[kind]:.2f}",
            " ".join(f"{r.seconds:.2f}" for r in recoveries),
            str(max(r.num_redone for r in recoveries)),
        ]
        for kind, recoveries in times.items()
    ]
    columns = ("state from", "layout", "median s", "each s", "steps redone (most)")
    show_table("SIGKILL to the next newly committed step, mlp", columns, rows)
    musts = [must for cost in costs for must in musts_of(cost)]
    replica, checkpoint = medians["live"], medians["checkpoint"]
    musts.append(Must("snapshot against live replica", medians["snapshot"] / replica, 2.0, "times"))
    musts.append(
        Must("snapshot against checkpoint", medians["snapshot"] / checkpoint, 1.0, "times")
    )
    redone = max(recovery.num_redone for recovery in times["snapshot"])
    musts.append(Must("steps redone from a snapshot", redone, 1, "steps"))
    return conclude(musts, options.check)


if __name__ == "__main__":
    sys.exit(main())
