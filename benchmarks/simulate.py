"""Benchmark of `elastic simulate`: traces replayed live, against their simulation.

    python benchmarks/simulate.py --check

Each piece of a trace is replayed at 20 times its speed: a private Ray cluster gets a node when the
trace adds one, and all processes of a node are killed when the trace removes it. Then the same
changes, at the times at which they really happened, are simulated with the costs that the run's own
files show. Goodput is the share of the time in steps that stay committed.
"""

from __future__ import annotations

import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from threading import Thread

import psutil
from cluster import Cluster, cluster
from elastic_run import RUN_NAME, ElasticRun, elastic_train
from processes import Program
from report import Must, conclude, parser, show_table

from actors.simulation.simulation import simulate
from elastic.simulation.trace import ADD, REMOVE, Availability, NodeChange, parse_trace
from pipelines.simulation.outcome import outcome_of
from pipelines.simulation.plan import plan_run
from pipelines.simulation.request import SimulateRequest

TRACES_FOLDER = Path(__file__).parent / "traces"
SPEED = 20.0
NUM_NODES = 3
"""Nodes of the trace; the head of the cluster is another one, which stays."""
HEAD = "head"
START_TIMEOUT_S = 120.0
QUIET_START_S = 25.0
"""Nothing changes while the first workers start: whether one of them is ready a moment before its
node is killed would decide the whole result."""
SETTINGS = ("growth.start_timeout_s=10",)
MOST_POINTS = 5.0


@dataclass(frozen=True)
class TracePiece:
    """A part of a trace: of all nodes, those that change in it most often."""

    name: str
    file: str
    begin_s: float


PIECES = (
    TracePiece("AWS p3 (Bamboo), from 9 h 55 min", "bamboo-p3.csv", 35700.0),
    TracePiece("AWS p3 (Bamboo), from 8 h 15 min", "bamboo-p3.csv", 29700.0),
    TracePiece("Parcae HH, from 15 min", "parcae-hh.txt", 900.0),
    TracePiece("Parcae LL, from its start", "parcae-ll.txt", 0.0),
)


def cut(trace: Availability, begin_s: float, seconds: float) -> list[NodeChange]:
    """The changes of a few nodes within a piece, at the speed of the replay; nodes that are there
    before are added at 0."""
    end_s, quiet_until_s = begin_s + seconds * SPEED, begin_s + QUIET_START_S * SPEED
    within = [c for c in trace.changes if quiet_until_s < c.time_s < end_s]
    names = [node for node, _ in Counter(change.node for change in within).most_common()]
    there: dict[str, bool] = {}
    for change in trace.changes:
        if change.time_s <= quiet_until_s:
            there[change.node] = change.kind == ADD
    names += [node for node, is_there in there.items() if is_there and node not in names]
    chosen = names[:NUM_NODES]
    first = [NodeChange(0.0, node, ADD) for node in chosen if there.get(node)]
    return first + [
        NodeChange((c.time_s - begin_s) / SPEED, c.node, c.kind) for c in within if c.node in chosen
    ]


@dataclass
class LiveReplay:
    """The changes of a piece on a real cluster, and when they happened."""

    ray: Cluster
    happened: list[tuple[float, str, str]] = field(default_factory=list)
    """Time, node and kind."""
    nodes: dict[str, Program] = field(default_factory=dict)
    starting: dict[str, Thread] = field(default_factory=dict)

    def add(self, node: str) -> None:
        self.nodes[node] = self.ray.add_node(1)
        self.happened.append((time.time(), node, ADD))

    def add_beside(self, node: str) -> None:
        """Add a node while others change."""
        self.starting[node] = thread = Thread(target=self.add, args=(node,))
        thread.start()

    def remove(self, node: str) -> None:
        """Kill all processes of a node."""
        if node in self.starting:
            self.starting.pop(node).join()
        program = self.nodes.pop(node)
        self.happened.append((time.time(), node, REMOVE))
        for process in program.family():
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)

    def play(self, changes: list[NodeChange], began: float, seconds: float) -> None:
        """Make the changes at their times, and wait for the end."""
        for change in changes:
            time.sleep(max(0.0, began + change.time_s - time.time()))
            if change.kind == ADD:
                self.add_beside(change.node)
            else:
                self.remove(change.node)
        for thread in self.starting.values():
            thread.join()
        time.sleep(max(0.0, began + seconds - time.time()))


@dataclass(frozen=True)
class ReplayComparison:
    piece: TracePiece
    num_changes: int
    live: float
    simulated: float

    @property
    def points(self) -> float:
        return 100 * abs(self.live - self.simulated)


def goodput(run: ElasticRun, began: float, end: float) -> float:
    """The share of the time in the last computation of each step."""
    newest = {line["step"]: line for line in run.metrics if line["time"] <= end}
    computed_s: float = sum(line["step_s"] for line in newest.values())
    return computed_s / (end - began)


def measured_costs(run: ElasticRun, replay: LiveReplay, began: float) -> Iterator[str]:
    """The costs that need the times of nodes: warm-up and detection."""
    added = {node: at for at, node, kind in replay.happened if kind == ADD}
    requested: dict[str, float] = {}
    for line in run.lines_of("StartWorkers"):
        requested |= dict.fromkeys(line["workers"], line["time"])
    waits = sorted(max(began, at) for at in added.values())
    warm_ups = []
    for line in run.lines_of("WorkerReady"):
        arrived = [at for at in (*waits, requested[line["worker"]]) if at <= line["time"]]
        warm_ups.append(line["time"] - max(arrived))
    yield f"warm_up_s={median(warm_ups)}"
    killed = [at for at, _, kind in replay.happened if kind == REMOVE]
    lost = [line["time"] for line in run.lines_of("WorkerLost")]
    delays = [min((at - kill for at in lost if at >= kill), default=0.0) for kill in killed]
    if delays:
        yield f"detect_s={max(0.0, median(delays))}"


def compare(piece: TracePiece, folder: Path, seconds: float) -> ReplayComparison:
    """Replay a piece and simulate it."""
    changes = cut(parse_trace((folder / piece.file).read_text()), piece.begin_s, seconds)
    with (
        TemporaryDirectory(prefix="sim-") as name,
        cluster(Path(name), 1) as ray,
        ExitStack() as following,
    ):
        replay = LiveReplay(ray)
        for change in changes:
            if change.time_s == 0:
                replay.add(change.node)
        storage = Path(name) / "storage"
        workers = f"1:{NUM_NODES + 1}"
        options = ["--workers", workers, *(f"--set={setting}" for setting in SETTINGS)]
        train = elastic_train(storage, "tiny", options, ray.environment)
        run = following.enter_context(train)
        run.wait_until(lambda: bool(run.lines_of("StartWorkers")), START_TIMEOUT_S, "the start")
        began = run.lines_of("StartWorkers")[0]["time"]
        replay.play([c for c in changes if c.time_s > 0], began, seconds)
        run.read()
        end = began + seconds
        live = goodput(run, began, end)
        costs = tuple(measured_costs(run, replay, began))
        following.close()
        trace = Path(name) / "trace.csv"
        rows = [(0.0, HEAD, ADD), *((max(0.0, t - began), n, k) for t, n, k in replay.happened)]
        rows = [row for row in sorted(rows) if row[0] < seconds] + [(seconds, HEAD, REMOVE)]
        lines = [f"{at:.3f},{node},{kind}" for at, node, kind in rows]
        trace.write_text("\n".join(["time,node,event", *lines]) + "\n")
        request = SimulateRequest(
            trace=str(trace),
            workers=workers,
            from_run=RUN_NAME,
            storage=str(storage),
            cost=costs,
            changes=SETTINGS,
        )
        planned = plan_run(request)
        outcome = outcome_of(planned, simulate(planned, lambda line, is_metrics: None), None)
    return ReplayComparison(piece, len(rows) - 2, live, outcome.goodput)


def main() -> int:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--traces", type=Path, default=TRACES_FOLDER)
    arguments.add_argument("--seconds", type=float, default=90.0, help="of each piece")
    arguments.add_argument("--pieces", type=int, default=len(PIECES))
    options = arguments.parse_args()
    done = [compare(piece, options.traces, options.seconds) for piece in PIECES[: options.pieces]]
    rows = [
        [c.piece.name, f"{c.num_changes}", f"{c.live:.2%}", f"{c.simulated:.2%}", f"{c.points:.1f}"]
        for c in done
    ]
    columns = ("piece of a trace", "changes", "goodput live", "simulated", "difference in points")
    show_table("Live replays and their simulation", columns, rows)
    musts = [Must(f"{c.piece.name}: difference", c.points, MOST_POINTS, "points") for c in done]
    return conclude(musts, options.check)


if __name__ == "__main__":
    sys.exit(main())
