"""Named actors of runs: their namespace, lookup, end, and the greeting of a restarted controller.

All runs share one namespace, whatever the namespace of the process that joined the cluster.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

import ray

NAMESPACE = "elastic"
KINDS = ("store", "snapshot_server", "agent", "observer")
"""The kinds of actors besides workers and the controller. An actor's name begins with its kind, and
ends with a time or an epoch."""
END_TIMEOUT_S = 10.0
GREET_EVERY_S = 1.0


def controller_name(run_name: str) -> str:
    return f"{run_name}:controller"


def actor_names() -> list[str]:
    """The names of all runs' actors on this cluster."""
    actors = ray.util.list_named_actors(all_namespaces=True)
    return [actor["name"] for actor in actors if actor["namespace"] == NAMESPACE]


def actor_of(name: str) -> Any:
    """The actor of this name. Raises `ValueError` if it does not exist, or has ended."""
    return ray.get_actor(name, namespace=NAMESPACE)


def find_actors(
    run_name: str, kind: str = "", known: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The run's actors of one of the `KINDS`, or without a kind its workers, by name. The actors in
    `known` are not looked up again."""
    actors: dict[str, Any] = {}
    for full_name in actor_names():
        run, _, name = full_name.rpartition(":")
        first, dash, _ = name.partition("-")
        if run == run_name and name != "controller" and (first if dash else "") == kind:
            with suppress(ValueError):  # it has ended meanwhile
                actors[name] = (known or {}).get(name) or actor_of(full_name)
    return actors


def newest_last(actors: dict[str, Any]) -> list[Any]:
    """The actors, ordered by the time in their names."""
    return [actors[name] for name in sorted(actors, key=_time_of)]


def newest_by_node(actors: dict[str, Any]) -> dict[str, Any]:
    """The newest snapshot server or agent of each node, by the node in its name."""
    return {name.split("-")[2]: actors[name] for name in sorted(actors, key=_time_of)}


def end_actors(run_name: str, but: str = "") -> None:
    """End every actor that a run still has on the joined cluster, except the one named `but`."""
    for name in actor_names():
        if name.rpartition(":")[0] == run_name and name != but:
            with suppress(ValueError):  # it has ended meanwhile
                ray.kill(actor_of(name))


def end_and_wait(run_name: str, names: Iterable[str]) -> None:
    """End these actors, and wait until their names are free again."""
    left = {f"{run_name}:{name}" for name in names}
    deadline = time.monotonic() + END_TIMEOUT_S
    for name in left:
        with suppress(ValueError):  # it has ended meanwhile
            ray.kill(actor_of(name))
    while left & set(actor_names()) and time.monotonic() < deadline:
        time.sleep(0.05)


class Greeter:
    """Greets the actors that a dead controller left alive. Else they might end as orphans while the
    new controller takes the lease and replays the journal."""

    def __init__(self, run_name: str) -> None:
        self._run_name = run_name
        self._actors: dict[str, Any] = {}
        self._closed = threading.Event()
        threading.Thread(target=self._serve, name="greeter", daemon=True).start()

    def close(self) -> None:
        """Stop: from now on the fleet talks to the actors."""
        self._closed.set()

    def _serve(self) -> None:
        while not self._closed.is_set():
            with suppress(ray.exceptions.RayError, ValueError):  # try again at the next interval
                self._greet()
            self._closed.wait(GREET_EVERY_S)

    def _greet(self) -> None:
        """Greet workers first, and each actor as soon as it is found."""
        for kind in ("", *KINDS):
            for name, actor in find_actors(self._run_name, kind, self._actors).items():
                self._actors[name] = actor
                (actor.hear if kind else actor.signs_of_life).remote()


def _time_of(name: str) -> int:
    return int(name.rpartition("-")[2])
