"""Reports about a lost or silent actor: the cause, its node, the state of its process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import ray

from actors.controller.fleet import answered, process_state
from actors.ray_backend.cluster.ray_private import node_of_actor
from elastic.protocol.events import Event, WorkerLost


def cause_of(error: BaseException | None) -> str:
    """The one line that matters of the paragraph by which Ray reports a death."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if isinstance(error, ray.exceptions.ActorDiedError) and "creation task" in lines[0]:
        return lines[-1]
    if isinstance(error, ray.exceptions.ActorDiedError):
        return "its process died"
    return lines[0] if lines else "it ended"


def report_loss(
    post: Callable[[Event], None], worker: str, actor: Any, node: str, cause: str
) -> None:
    """Post `WorkerLost`. If the worker died before it reported its node, query Ray for it."""
    if node:
        post(WorkerLost(worker, cause, node))
        return

    def query() -> None:
        last_node = ""
        with suppress(ray.exceptions.RayError, ValueError, RuntimeError):  # the node is unknown
            last_node = node_of_actor(actor)
        post(WorkerLost(worker, cause, last_node))

    _run_in_thread(query)


def query_state(pid: int, is_here: bool, agent: Any) -> Future[str]:
    """The state of a process. On another machine its node's agent is queried.

    The state is unknown without an agent that has answered (it starts 10 s after the first
    workers).
    """
    if is_here:
        return answered(process_state(pid))
    if agent is None or not pid:
        return answered("may run")
    answer: Future[str] = agent.process_state.remote(pid).future()
    return answer


def end_unreachable(actor: Any, error: BaseException | None) -> None:
    """End an actor that cannot be reached: it may live, and would occupy its resources until it
    ends as an orphan."""
    if isinstance(error, ray.exceptions.ActorUnavailableError):
        _end_in_thread(actor)


def end_without_agent(actor: Any, answer: Future[None]) -> None:
    """End an actor through Ray if the agent did not answer the request to end it."""
    if answer.exception() is not None:
        _end_in_thread(actor)


def _end_in_thread(actor: Any) -> None:
    def end() -> None:
        with suppress(ray.exceptions.RayError, ValueError):  # it is gone
            ray.kill(actor)

    _run_in_thread(end)


def _run_in_thread(call: Callable[[], None]) -> None:
    """Call on another thread, since Ray's callbacks must not wait for Ray."""
    threading.Thread(target=call, name="loss", daemon=True).start()
