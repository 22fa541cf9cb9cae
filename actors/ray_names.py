"""The names of all runs' actors: in one namespace, whatever that of the process is which joined."""

from __future__ import annotations

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
