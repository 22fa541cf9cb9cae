"""Simulated nodes and the worker processes on them: spot nodes come and go with a trace, on-demand
nodes when workers request them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from actors.simulation.machine_hours import MachineHours
from actors.simulation.timeline import Timeline
from elastic.planner.market.exchange import ON_DEMAND, SPOT
from elastic.protocol.commands import StartWorkers
from elastic.protocol.controller_events import WorkerPlaced
from elastic.protocol.events import Event, NodeDraining, WorkerLost, WorkerReady
from elastic.simulation.costs import Costs
from elastic.simulation.trace import ADD, NOTICE, Availability, NodeChange

LATENCY_S = 0.002
NODE_GONE = "its node is gone"
IDLE_S = 300.0
"""An idle node is released after this time, as `idle_timeout_minutes` in cluster.yaml says."""


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
        self.hours = MachineHours()
        self._timeline = timeline
        self._costs = costs
        self._per_node = workers_per_node
        self._post = post
        self._on_lost, self._on_node_lost = on_lost, on_node_lost
        self._load: Counter[str] = Counter()
        self._free: dict[str, dict[str, None]] = {SPOT: {}, ON_DEMAND: {}}
        """By market, the nodes with room for another worker, the oldest first."""
        self._ending: set[str] = set()
        self._waiting: dict[str, StartWorkers] = {}
        self._idle_since: dict[str, float] = {}
        self._on_demand: set[str] = set()
        self._num_ordered = 0
        """On-demand nodes that start."""
        self._num_on_demand = 0
        """All that were ever ordered."""

    def play(self, trace: Availability) -> None:
        """Schedule all changes of a trace."""
        for change in trace.changes:
            self._timeline.after(change.time_s, partial(self._change, change))

    def start(self, command: StartWorkers) -> None:
        for name in command.workers:
            self._waiting[name] = command
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
            self._free[SPOT][node] = None
            self._place()
        elif change.kind == NOTICE:
            self._ending.add(node)
            self._free[SPOT].pop(node, None)
            self._post(NodeDraining(node, change.until_s, "the trace"))
        else:
            self._remove(node)

    def _remove(self, node: str) -> None:
        self.nodes.discard(node)
        self.hours.end(node, self._timeline.now)
        for worker in [worker for worker in self.workers.values() if worker.node == node]:
            self._end(worker)
            lost = WorkerLost(worker.name, NODE_GONE, node)
            self._timeline.after(self._costs.detect_s, partial(self._post, lost))
        self._load.pop(node, None)
        self._idle_since.pop(node, None)
        self._free[self._market_of(node)].pop(node, None)
        self._on_node_lost(node)

    def _end(self, worker: WorkerProcess) -> None:
        del self.workers[worker.name]
        self._load[worker.node] -= 1
        if worker.node in self.nodes and worker.node not in self._ending:
            self._free[self._market_of(worker.node)][worker.node] = None
        if not self._load[worker.node]:
            self._be_idle(worker.node)
        self._on_lost(worker)

    def _market_of(self, node: str) -> str:
        return ON_DEMAND if node in self._on_demand else SPOT

    def _be_idle(self, node: str) -> None:
        self._idle_since[node] = now = self._timeline.now
        self._timeline.after(IDLE_S, partial(self._release, node, now))

    def _release(self, node: str, since: float) -> None:
        """Release a node that has been idle since then; a spot node may be requested again."""
        if self._idle_since.get(node) != since:
            return
        del self._idle_since[node]
        self.hours.end(node, self._timeline.now)
        if node in self._on_demand:
            self._remove(node)
            self._on_demand.discard(node)

    def _order(self) -> None:
        """Start on-demand nodes for the workers that wait for one."""
        num_waiting = sum(command.market == ON_DEMAND for command in self._waiting.values())
        num_wanted = -(-num_waiting // self._per_node) - self._num_ordered
        num_there = len(self._on_demand) + self._num_ordered
        for _ in range(min(num_wanted, self._costs.on_demand_nodes - num_there)):
            self._num_ordered += 1
            self._timeline.after(self._costs.on_demand_start_s, self._add_on_demand)

    def _add_on_demand(self) -> None:
        self._num_ordered -= 1
        node = f"on-demand{self._num_on_demand}"
        self._num_on_demand += 1
        self.nodes.add(node)
        self._on_demand.add(node)
        self._free[ON_DEMAND][node] = None
        self.hours.begin(node, ON_DEMAND, self._timeline.now)
        self._be_idle(node)  # the request may have been withdrawn
        self._place()

    def _place(self) -> None:
        """Start waiting workers on free nodes."""
        for name, command in list(self._waiting.items()):
            free = self._free[command.market or SPOT]
            node = next((node for node in free if node not in command.quarantined), None)
            if node is None:
                continue
            del self._waiting[name]
            self._load[node] += 1
            self._idle_since.pop(node, None)
            if self._load[node] >= self._per_node:
                del free[node]
            self.hours.begin(node, self._market_of(node), self._timeline.now)
            worker = self.workers[name] = WorkerProcess(name, node)
            self._timeline.after(self._costs.warm_up_s, partial(self._be_ready, worker))
            if command.market:
                self._timeline.after(LATENCY_S, partial(self._post, WorkerPlaced(name, node)))
        self._order()

    def _be_ready(self, worker: WorkerProcess) -> None:
        if self.workers.get(worker.name) is worker:
            worker.is_ready = True
            market = self._market_of(worker.node)
            self._post(WorkerReady(worker.name, worker.node, 1, market=market))
