"""Simulated nodes and the worker processes on them, as a trace lets them come and go."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from actors.simulation.timeline import Timeline
from elastic.protocol.commands import StartWorkers
from elastic.protocol.events import Event, NodeDraining, WorkerLost, WorkerReady
from elastic.simulation.costs import Costs
from elastic.simulation.trace import ADD, NOTICE, Availability, NodeChange

LATENCY_S = 0.002
NODE_GONE = "its node is gone"


@dataclass(slots=True)
class WorkerProcess:
    """One worker's process; `step` is that of the state that it holds, None if it has none."""

    name: str
    node: str
    is_ready: bool = False
    step: int | None = None


class SimulatedCluster:
    """Places workers on available nodes; a worker without a free node waits for one."""

    def __init__(
        self,
        timeline: Timeline,
        costs: Costs,
        workers_per_node: int,
        post: Callable[[Event], None],
        on_lost: Callable[[WorkerProcess], None],
        on_node_lost: Callable[[str], None],
    ) -> None:
        """`on_lost` and `on_node_lost` are called at once, the events of the loss later."""
        self.workers: dict[str, WorkerProcess] = {}
        self.nodes: set[str] = set()
        self._timeline = timeline
        self._costs = costs
        self._per_node = workers_per_node
        self._post = post
        self._on_lost, self._on_node_lost = on_lost, on_node_lost
        self._load: Counter[str] = Counter()
        self._free: dict[str, None] = {}
        """The nodes with room for another worker, the oldest first."""
        self._ending: set[str] = set()
        self._waiting: dict[str, tuple[str, ...]] = {}

    def play(self, trace: Availability) -> None:
        """Schedule all changes of a trace."""
        for change in trace.changes:
            self._timeline.after(change.time_s, partial(self._change, change))

    def start(self, command: StartWorkers) -> None:
        for name in command.workers:
            self._waiting[name] = command.quarantined
        self._place()

    def stop(self, name: str) -> None:
        """End a process, or its wait for a node."""
        worker = self.workers.get(name)
        if worker:
            self._end(worker)
        if worker or self._waiting.pop(name, None) is not None:
            lost = WorkerLost(name, "stopped", worker.node if worker else "")
            self._timeline.after(LATENCY_S, partial(self._post, lost))
        self._place()

    def alive(self, names: Sequence[str]) -> list[WorkerProcess]:
        """Those of these workers whose processes live."""
        return [self.workers[name] for name in names if name in self.workers]

    def _change(self, change: NodeChange) -> None:
        node = change.node
        if change.kind == ADD:
            self.nodes.add(node)
            self._ending.discard(node)
            self._free[node] = None
            self._place()
        elif change.kind == NOTICE:
            self._ending.add(node)
            self._free.pop(node, None)
            self._post(NodeDraining(node, change.until_s, "the trace"))
        else:
            self._remove(node)

    def _remove(self, node: str) -> None:
        self.nodes.discard(node)
        self._free.pop(node, None)
        for worker in [worker for worker in self.workers.values() if worker.node == node]:
            self._end(worker)
            lost = WorkerLost(worker.name, NODE_GONE, node)
            self._timeline.after(self._costs.detect_s, partial(self._post, lost))
        self._load.pop(node, None)
        self._free.pop(node, None)
        self._on_node_lost(node)

    def _end(self, worker: WorkerProcess) -> None:
        del self.workers[worker.name]
        self._load[worker.node] -= 1
        if worker.node in self.nodes - self._ending:
            self._free[worker.node] = None
        self._on_lost(worker)

    def _place(self) -> None:
        """Start waiting workers on free nodes."""
        for name, quarantined in list(self._waiting.items()):
            if not self._free:
                return
            node = next((node for node in self._free if node not in quarantined), None)
            if node is None:
                continue
            del self._waiting[name]
            self._load[node] += 1
            if self._load[node] >= self._per_node:
                del self._free[node]
            worker = self.workers[name] = WorkerProcess(name, node)
            self._timeline.after(self._costs.warm_up_s, partial(self._be_ready, worker))

    def _be_ready(self, worker: WorkerProcess) -> None:
        if self.workers.get(worker.name) is worker:
            worker.is_ready = True
            self._post(WorkerReady(worker.name, worker.node, 1))
