"""The agents of a run: one on each node that has workers, except the controller's own node."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Set
from concurrent.futures import Future
from functools import partial
from typing import Any

import ray

from actors.notices import TimedNotice
from actors.ray_backend.cluster.node_drains import Drains


class NodeAgents:
    """The live agents by node. Any thread may call the methods."""

    def __init__(self, start: Callable[[str], Any], own_node: str, drains: Drains) -> None:
        """`start` starts an agent on a node; `drains` gets the notices of all agents."""
        self._start = start
        self._nodes_without = {own_node, ""}
        self._drains = drains
        self._agents: dict[str, Any] = {}
        self._heard: set[str] = set()
        self._lock = threading.Lock()
        self._is_closed = False

    def attach(self, agents: Mapping[str, Any]) -> None:
        """Take over the agents of a dead controller."""
        with self._lock:
            self._agents.update(agents)

    def agent_of(self, node: str, has_answered: bool = False) -> Any:
        """The node's agent; None if there is none, or none that has answered."""
        with self._lock:
            return None if has_answered and node not in self._heard else self._agents.get(node)

    def beat(self) -> None:
        """Greet all agents, so that they do not end as orphans, and take their notices."""
        with self._lock:
            agents = list(self._agents.items())
        for node, agent in agents:
            answer = agent.hear.remote().future()
            answer.add_done_callback(partial(self.take_answer, node, agent))

    def take_answer(self, node: str, agent: Any, answer: Future[TimedNotice | None]) -> None:
        """Take an agent's notice, or note its loss: then `ray.kill` does its work until the node
        has another agent. Calls to its predecessor may fail later."""
        with self._lock:
            if self._agents.get(node) is not agent:
                return
            if answer.exception() is not None:
                self._heard.discard(node)
                del self._agents[node]
                return
            self._heard.add(node)
        self._drains.take(node, answer.result())

    def keep(self, nodes: Set[str], with_workers: Set[str]) -> None:
        """Start an agent on each of these nodes, and end the agents on nodes without workers."""
        with self._lock:
            lacking = sorted(nodes - self._agents.keys() - self._nodes_without)
            deserted = self._agents.keys() - with_workers
            self._heard -= deserted
            idle = [self._agents.pop(node) for node in deserted]
        for agent in idle:
            ray.kill(agent)  # else its node would not be idle, and never be released
        for node in lacking:
            agent = self._start(node)
            with self._lock:
                self._agents[node] = agent
        if self._is_closed:
            self.close()

    def close(self) -> None:
        """End all agents."""
        self._is_closed = True
        with self._lock:
            agents = list(self._agents.values())
        for agent in agents:
            ray.kill(agent)
