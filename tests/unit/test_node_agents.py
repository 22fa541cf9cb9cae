"""Answers of a node's agents: late failures of one that has died do not concern its successor."""

from __future__ import annotations

from concurrent.futures import Future

from actors.notices import Notice, TimedNotice
from actors.ray_backend.cluster.node_agents import NodeAgents
from actors.ray_backend.cluster.node_drains import Drains
from elastic.protocol.events import Event, NodeAtRisk


class StartedAgents:
    """Agents that only exist; the newest is the last."""

    def __init__(self) -> None:
        self.started: list[tuple[str, object]] = []
        self.events: list[Event] = []
        self.agents = NodeAgents(self._start, "own", Drains(self.events.append))

    def _start(self, node: str) -> object:
        self.started.append((node, object()))
        return self.started[-1][1]


def failed() -> Future[TimedNotice | None]:
    answer: Future[TimedNotice | None] = Future()
    answer.set_exception(ConnectionError("its process died"))
    return answer


def answered(notice: TimedNotice | None) -> Future[TimedNotice | None]:
    answer: Future[TimedNotice | None] = Future()
    answer.set_result(notice)
    return answer


def test_late_failures_of_a_dead_agent_do_not_discard_its_successor() -> None:
    world = StartedAgents()
    world.agents.keep({"a"}, {"a"})
    [(_, first)] = world.started
    world.agents.take_answer("a", first, answered(None))
    assert world.agents.agent_of("a", has_answered=True) is first
    world.agents.take_answer("a", first, failed())
    assert world.agents.agent_of("a") is None
    world.agents.keep({"a"}, {"a"})
    second = world.started[1][1]
    world.agents.take_answer("a", first, failed())
    world.agents.keep({"a"}, {"a"})
    assert world.agents.agent_of("a") is second
    assert len(world.started) == 2
    assert world.agents.agent_of("a", has_answered=True) is None
    world.agents.take_answer("a", second, failed())
    assert world.agents.agent_of("a") is None


def test_notice_of_an_agent_reaches_the_core() -> None:
    world = StartedAgents()
    world.agents.keep({"a"}, {"a"})
    [(_, agent)] = world.started
    world.agents.take_answer("a", agent, answered(TimedNotice(Notice("rebalance"), None)))
    assert world.events == [NodeAtRisk("a", "rebalance")]


def test_no_agent_starts_on_the_own_node_or_for_workers_whose_node_is_not_known() -> None:
    world = StartedAgents()
    world.agents.keep({"own", "", "a"}, {"own", "", "a"})
    assert [node for node, _ in world.started] == ["a"]
