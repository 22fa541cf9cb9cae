"""What is reported of an actor that has died or is silent: why, where, what its process does."""

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
    """Ray tells of a death in a paragraph; what matters of it is one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if isinstance(error, ray.exceptions.ActorDiedError) and "creation task" in lines[0]:
        return lines[-1]
    if isinstance(error, ray.exceptions.ActorDiedError):
        return "its process died"
    return lines[0] if lines else "it ended"


def tell_loss(
    post: Callable[[Event], None], worker: str, actor: Any, node: str, cause: str
) -> None:
    """Post `WorkerLost`. Where one was that died before it could say so, Ray knows."""
    if node:
        post(WorkerLost(worker, cause, node))
        return

    def ask() -> None:
        where = ""
        with suppress(ray.exceptions.RayError, ValueError, RuntimeError):  # then nobody knows
            where = node_of_actor(actor)
        post(WorkerLost(worker, cause, where))

    _beside(ask)


def ask_state(pid: int, is_here: bool, agent: Any) -> Future[str]:
    """What a process does; its node's agent is asked where it is not on this machine.

    Without an agent that has been heard (one is started 10 s after the first workers) nobody knows.
    """
    if is_here:
        return answered(process_state(pid))
    if agent is None or not pid:
        return answered("may run")
    answer: Future[str] = agent.process_state.remote(pid).future()
    return answer


def end_unreachable(actor: Any, error: BaseException | None) -> None:
    """Who cannot be reached may live, and shall not keep its place until it hears nobody."""
    if isinstance(error, ray.exceptions.ActorUnavailableError):
        _end_beside(actor)


def end_without_agent(actor: Any, answer: Future[None]) -> None:
    """What an agent was asked to do may be lost with it, or on the way to it."""
    if answer.exception() is not None:
        _end_beside(actor)


def _end_beside(actor: Any) -> None:
    def end() -> None:
        with suppress(ray.exceptions.RayError, ValueError):  # it is gone
            ray.kill(actor)

    _beside(end)


def _beside(call: Callable[[], None]) -> None:
    """On a thread of its own, since Ray's callbacks must not wait for Ray."""
    threading.Thread(target=call, name="loss", daemon=True).start()
