"""Ray fleet: workers, store, agents and snapshot servers as detached Ray actors."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors.controller.fleet import missing
from actors.controller.guard import describe
from actors.notices import watch_this_machine, with_time_left
from actors.ray_backend.actor_losses import (
    cause_of,
    end_unreachable,
    end_without_agent,
    query_state,
    report_loss,
)
from actors.ray_backend.actor_names import (
    end_and_wait,
    find_actors,
    newest_by_node,
    newest_last,
)
from actors.ray_backend.cluster.ended_output import EndedOutput
from actors.ray_backend.cluster.node_agents import NodeAgents
from actors.ray_backend.cluster.node_drains import Drains
from actors.ray_backend.cluster.node_labels import placement_labels
from actors.ray_backend.cluster.ray_private import ON_HEAD
from actors.ray_backend.cluster.start_queue import StartQueue
from actors.ray_backend.detached_actor import detached
from actors.ray_backend.snapshot_servers import RaySnapshotServer, SnapshotServers
from actors.ray_backend.worker import RayAgent, RayStore, RayWorker
from actors.runtime.factory import Factory
from actors.worker.worker_options import Envelope, WorkerOptions
from elastic.protocol.commands import Order, StartWorkers
from elastic.protocol.controller_events import WorkerPlaced
from elastic.protocol.controller_state import ControllerState
from elastic.protocol.events import Event, StoreLost, StoreReady, WorkerLost

HEARTBEAT_S = 2.0
CLOSE_TIMEOUT_S = 10.0
ANSWER_S = 1.0
GONE = "it was gone when the controller came back"
AGENT_DELAY_S = 10.0
"""The delay of a node's agent after its first workers have started: a process that starts while
they join makes that pause 0.25 s longer on two cores. Until the agent has started, `ray.kill` ends
a stopped worker, which takes 5 s."""


@dataclass(frozen=True)
class _WorkerRecord:
    """A worker's actor and, once it has started, its node and process."""

    actor: Any
    node: str = ""
    pid: int = 0
    started: float = inf
    market: str = ""
    files: Mapping[str, Path] = field(default_factory=dict)
    """The files of its output on its node."""
    is_ending: bool = False
    """Once ordered to end, the worker gets no more probes: if the order is lost, it ends as an
    orphan."""


class RayFleet:
    """One actor a worker with plain resources. Workers that find no node stay pending, which is the
    demand that the Ray autoscaler sees."""

    def __init__(
        self,
        run_name: str,
        program: Factory,
        options: WorkerOptions,
        resources: dict[str, Any],
        orphan_timeout_s: float,
        post: Callable[[Event], None],
        incarnation: int,
    ) -> None:
        self._run_name = run_name
        self._program = program
        self._options = options
        self._resources = resources
        self._orphan_timeout_s = orphan_timeout_s
        self._post = post
        self._incarnation = incarnation
        self._node = ray.get_runtime_context().get_node_id()
        self._controller = ray.get_runtime_context().current_actor
        self._records: dict[str, _WorkerRecord] = {}
        self._probed: set[str] = set()
        self._servers = SnapshotServers(
            run_name, self._start_server, post, has_standbys=options.snapshot_every != 0
        )
        self._starts = StartQueue(self._start_failed)
        self._store: Any = None
        self._drains = Drains(post)
        self._agents = NodeAgents(self._start_agent, self._node, self._drains)
        self._output = EndedOutput(options.run_folder, self._node, self._agents.agent_of)
        self._watcher = watch_this_machine()
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._has_started = threading.Event()
        """Set when a worker's process has started."""
        self.is_head_gone = False
        """Whether Ray's GCS is gone: then Ray starts and ends no actor, and reports no death."""
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()
        threading.Thread(target=self._exchange_notices, name="notices", daemon=True).start()

    def start_store(self) -> None:
        name = f"store-{self._incarnation}-{time.monotonic_ns()}"
        kind = detached(self._run_name, RayStore, name, num_cpus=0, resources=ON_HEAD)
        self._take_store(kind.remote(self._options.network, self._orphan_timeout_s))

    def _take_store(self, store: Any) -> None:
        self._store = store
        self._when_done(store.address.remote(), self._store_ready)
        self._when_done(store.live.remote(), self._store_lost)

    def start_workers(self, command: StartWorkers) -> None:
        options = self._resources | placement_labels(command.quarantined, command.market)
        for worker in command.workers:
            self._starts.add(worker, partial(self._start_worker, worker, options, command))

    def _start_worker(self, worker: str, options: dict[str, Any], command: StartWorkers) -> None:
        actor = detached(self._run_name, RayWorker, worker, **options).remote(
            worker,
            self._program,
            self._options,
            self._controller,
            self._incarnation,
            self._orphan_timeout_s,
            command.peers,
        )
        self._add_worker(worker, _WorkerRecord(actor, market=command.market))

    def _start_failed(self, worker: str, error: Exception) -> None:
        self._post(WorkerLost(worker, f"it cannot be started: {describe('', error).message}"))

    def _add_worker(self, worker: str, record: _WorkerRecord) -> None:
        with self._lock:
            self._records[worker] = record
        actor, life = record.actor, record.actor.live.remote()
        self._when_done(actor.start.remote(), partial(self._worker_started, worker))
        self._when_done(life, partial(self._worker_lost, worker))

    def start_snapshot_server(self, node: str) -> None:
        self._servers.start(node)

    def _start_server(self, node: str) -> Any:
        name = f"snapshot_server-{self._incarnation}-{node}-{time.monotonic_ns()}"
        placement = {"scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False)}
        kind = detached(self._run_name, RaySnapshotServer, name, num_cpus=0, **placement)
        options = self._options
        return kind.remote(
            options.network, options.secret, options.max_snapshot_bytes, self._orphan_timeout_s
        )

    def query_snapshot_servers(self, nodes: Sequence[str], generation: int) -> None:
        self._servers.query(nodes, generation)

    def forget_snapshots(self, nodes: Sequence[str], generation: int, kept_generation: int) -> None:
        self._servers.forget(nodes, generation, kept_generation)

    def stop_worker(self, worker: str) -> None:
        if self._starts.cancel(worker):
            self._post(WorkerLost(worker, "it was stopped before it was started"))
            return
        with self._lock:
            record = self._records.get(worker)
            if record is None:
                return
            self._records[worker] = replace(record, is_ending=True)
        agent = self._agents.agent_of(record.node)
        if record.pid and record.node == self._node:
            with suppress(ProcessLookupError):  # it has ended already
                os.kill(record.pid, signal.SIGKILL)
        elif agent is not None:
            self._when_done(agent.kill.remote(record.pid), partial(end_without_agent, record.actor))
        elif self.is_head_gone:
            _end_directly(record.actor)
        else:
            ray.kill(record.actor)

    def send(self, workers: Iterable[str], order: Order) -> None:
        shared = ray.put(Envelope(self._incarnation, order))
        for worker in workers:
            with self._lock:
                record = self._records.get(worker)
            if record is not None:
                record.actor.take.remote(shared)

    def probe(self, worker: str) -> Future[int]:
        with self._lock:
            record = self._records.get(worker)
        if record is None or record.is_ending:
            return missing(worker)
        self._probed.add(worker)
        answer: Future[int] = record.actor.signs_of_life.remote().future()
        return answer

    def process_state(self, worker: str) -> Future[str]:
        with self._lock:
            record = self._records.get(worker, _WorkerRecord(None))
        agent = self._agents.agent_of(record.node, has_answered=True)
        return query_state(record.pid, record.node == self._node, agent)

    def probe_snapshot_server(self, node: str) -> Future[None]:
        return self._servers.probe(node) or missing(node)

    def stop_snapshot_server(self, node: str) -> None:
        self._servers.stop(node)

    def newest_generation(self) -> int:
        """See `Survivors`. A worker that is just starting may not answer in time."""
        queries = [a.newest_generation.remote() for a in find_actors(self._run_name).values()]
        if not queries:
            return 0
        answered, _ = ray.wait(queries, num_returns=len(queries), timeout=ANSWER_S)
        generations = [0]
        for answer in answered:
            with suppress(ray.exceptions.RayError):  # it has just died
                generations.append(ray.get(answer))
        return max(generations)

    def attach(self, state: ControllerState) -> None:
        """See `Survivors`."""
        self._attach_store(state)
        self._servers.attach(state)
        self._agents.attach(newest_by_node(find_actors(self._run_name, "agent")))
        workers = find_actors(self._run_name)
        end_and_wait(self._run_name, workers.keys() - state.membership.records.keys())
        for worker in sorted(state.membership.records):
            if worker in workers:
                workers[worker].meet.remote(self._incarnation, state.committed_step)
                known = state.membership.records[worker]  # a stopped worker cannot report its node
                started = time.monotonic() if known.node else inf  # else it may be pending
                place = known.node, known.pid, started, known.market
                record = _WorkerRecord(workers[worker], *place)
                self._add_worker(worker, record)
            elif worker in state.membership.warm:
                self._post(WorkerLost(worker, GONE))
            else:
                known = state.membership.records[worker]
                start = StartWorkers((worker,), known.quarantined, market=known.market)
                self.start_workers(start)

    def end_survivors(self) -> None:
        """See `Survivors`."""
        kinds = ("", "store", "snapshot_server", "agent")
        end_and_wait(self._run_name, (n for k in kinds for n in find_actors(self._run_name, k)))

    def _attach_store(self, state: ControllerState) -> None:
        stores = newest_last(find_actors(self._run_name, "store"))
        for store in stores[:-1]:
            ray.kill(store)
        if stores:
            self._take_store(stores[-1])
        elif state.store.port:
            self._post(StoreLost(GONE))
        else:
            self.start_store()

    def close(self) -> None:
        """End all actors of the run, and wait until Ray has reported the end of each."""
        self._closed.set()
        self._has_started.set()
        self._watcher.close()
        self._starts.close(CLOSE_TIMEOUT_S)
        with self._lock:
            workers = list(self._records)
        for worker in workers:
            self.stop_worker(worker)
        end = _end_directly if self.is_head_gone else ray.kill
        self._servers.close(end)
        if self._store is not None:
            end(self._store)
        if self.is_head_gone:
            return  # the agents end as orphans
        deadline = time.monotonic() + CLOSE_TIMEOUT_S
        while self._is_any_open() and time.monotonic() < deadline:
            time.sleep(0.02)
        self._agents.close()  # only after they have ended the workers
        with suppress(ray.exceptions.RayError):  # the cluster is gone, and its actors with it
            self.end_survivors()  # those of a dead controller that were not taken over

    def _is_any_open(self) -> bool:
        return bool(self._records or len(self._servers) or len(self._output))

    def _when_done(self, answer: Any, then: Callable[[Future[Any]], None]) -> None:
        answer.future().add_done_callback(then)

    def _store_ready(self, answer: Future[Any]) -> None:
        if answer.exception() is None:
            self._post(StoreReady(*answer.result()))

    def _store_lost(self, answer: Future[Any]) -> None:
        if not self._closed.is_set():
            self._post(StoreLost(cause_of(answer.exception())))

    def _worker_started(self, worker: str, answer: Future[tuple[str, int, Any]]) -> None:
        """Note where a worker runs, so that a signal can end it."""
        if answer.exception() is not None:
            return  # it died, which the end of `live` reports
        node, pid, files = answer.result()
        with self._lock:
            record = self._records.get(worker)
            if record is not None:
                self._records[worker] = replace(
                    record, node=node, pid=pid, started=time.monotonic(), files=files
                )
        if record is not None and record.market:
            self._post(WorkerPlaced(worker, node))
        self._has_started.set()

    def _worker_lost(self, worker: str, life: Future[Any]) -> None:
        with self._lock:
            record = self._records.get(worker)
        if record is not None:  # it stays until its copy has begun, since `close` waits for both
            self._output.copy(worker, record.node, record.files)
            with self._lock:
                self._records.pop(worker, None)
        if not self._closed.is_set() and record is not None:
            end_unreachable(record.actor, life.exception())
            report_loss(self._post, worker, record.actor, record.node, cause_of(life.exception()))

    def _beat(self) -> None:
        """Greet the actors that get no probes, so that they do not end as orphans."""
        while not self._closed.wait(HEARTBEAT_S):
            with self._lock:
                workers = list(self._records.items())
            for worker, record in workers:
                if record.pid and not record.is_ending and worker not in self._probed:
                    record.actor.signs_of_life.remote()
            self._servers.beat()
            self._output.beat()
            if self._store is not None:
                self._store.hear.remote()
            self._agents.beat()

    def _exchange_notices(self) -> None:
        """Take this machine's own notices, since it has no agent, and exchange notices with Ray
        about nodes that have workers or snapshots. Keep agents and standbys on such nodes.

        Calls to Ray may take long without its GCS, and the heartbeat must not wait for them.
        (Ray's callbacks may not create actors.)
        """
        while not self._closed.is_set():
            self._has_started.wait(HEARTBEAT_S)
            self._has_started.clear()
            if self._closed.is_set() or self.is_head_gone:
                return
            with self._lock:
                with_workers = {record.node for record in self._records.values()} - {""}
            with suppress(ray.exceptions.RayError, ValueError):  # try again at the next interval
                self._servers.keep_standbys(with_workers)
                self._keep_agents(with_workers)
            nodes = with_workers | self._servers.nodes
            if self._node in nodes:
                self._drains.take(self._node, with_time_left(self._watcher.notice))
            with suppress(ray.exceptions.RayError):  # try again at the next interval
                self._drains.exchange(nodes)

    def _keep_agents(self, with_workers: set[str]) -> None:
        """Keep an agent on each node that has had workers for long enough."""
        old = time.monotonic() - AGENT_DELAY_S
        with self._lock:
            nodes = {record.node for record in self._records.values() if record.started < old}
        self._agents.keep(nodes, with_workers)

    def _start_agent(self, node: str) -> Any:
        name = f"agent-{self._incarnation}-{node}-{time.monotonic_ns()}"
        placement = {"scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False)}
        kind = detached(self._run_name, RayAgent, name, num_cpus=0, **placement)
        return kind.remote(self._orphan_timeout_s)


def _end_directly(actor: Any) -> None:
    actor.end.remote()
