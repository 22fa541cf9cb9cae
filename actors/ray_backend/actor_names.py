"""The names of all runs' actors: in one namespace, whatever that of the process is which joined."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

import ray

NAMESPACE = "elastic"


def actor_names() -> list[str]:
    """Of all runs on this cluster."""
    told = ray.util.list_named_actors(all_namespaces=True)
    return [actor["name"] for actor in told if actor["namespace"] == NAMESPACE]


def actor_of(name: str) -> Any:
    """Raises `ValueError` if there is none, or no more."""
    return ray.get_actor(name, namespace=NAMESPACE)


END_TIMEOUT_S = 10.0

GREET_EVERY_S = 1.0

KINDS = ("store", "snapshot_server", "agent", "observer")
"""Beside workers and the controller; their names begin so, and end with a time or an epoch."""


def find_actors(
    run_name: str, kind: str = "", known: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The run's actors of one of the `KINDS` by their names; without one, its workers. Those that
    are `known` are not looked up again."""
    found: dict[str, Any] = {}
    for full_name in actor_names():
        run, _, name = full_name.rpartition(":")
        first, dash, _ = name.partition("-")
        if run == run_name and name != "controller" and (first if dash else "") == kind:
            with suppress(ValueError):  # it has ended meanwhile
                found[name] = (known or {}).get(name) or actor_of(full_name)
    return found


def end_and_wait(run_name: str, names: Iterable[str]) -> None:
    """End these, and wait until their names may be taken again."""
    left = {f"{run_name}:{name}" for name in names}
    deadline = time.monotonic() + END_TIMEOUT_S
    for name in left:
        with suppress(ValueError):  # it has ended meanwhile
            ray.kill(actor_of(name))
    while left & set(actor_names()) and time.monotonic() < deadline:
        time.sleep(0.05)


class Greeter:
    """Tells the actors that a dead controller has left alive that it is back, so that none ends
    itself as an orphan while the new controller takes the lease and replays the journal."""

    def __init__(self, run_name: str) -> None:
        self._run_name = run_name
        self._actors: dict[str, Any] = {}
        self._closed = threading.Event()
        threading.Thread(target=self._serve, name="greeter", daemon=True).start()

    def close(self) -> None:
        """From now on the fleet talks to them."""
        self._closed.set()

    def _serve(self) -> None:
        while not self._closed.is_set():
            with suppress(ray.exceptions.RayError, ValueError):  # the next time tries again
                self._greet()
            self._closed.wait(GREET_EVERY_S)

    def _greet(self) -> None:
        """Workers first; each as soon as it is found."""
        for kind in ("", *KINDS):
            for name, actor in find_actors(self._run_name, kind, self._actors).items():
                self._actors[name] = actor
                (actor.hear if kind else actor.signs_of_life).remote()


def newest_last(actors: dict[str, Any]) -> list[Any]:
    """By the time in their names."""
    return [actors[name] for name in sorted(actors, key=_time_of)]


def newest_by_node(actors: dict[str, Any]) -> dict[str, Any]:
    """Keepers or agents by the node in their names, of each node the newest."""
    return {name.split("-")[2]: actors[name] for name in sorted(actors, key=_time_of)}


def _time_of(name: str) -> int:
    return int(name.rpartition("-")[2])
