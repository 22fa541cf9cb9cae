"""Detached actors: their creation, and what ties their processes to the run (invariant 12)."""

from __future__ import annotations

import threading
from functools import cache
from typing import Any, ClassVar

import ray

from actors.ray_backend.actor_names import NAMESPACE
from actors.runtime.orphan_guard import OrphanGuard, end_process


class DetachedActor:
    """An actor that ends on request, and when it has not heard the run for `orphan_timeout_s`.

    Its methods run one at a time, but `live` has a thread of its own.
    """

    GROUPS: ClassVar = {"life": 1}

    def __init__(self, orphan_timeout_s: float) -> None:
        self._orphan_guard = OrphanGuard(orphan_timeout_s)

    def hear(self) -> None:
        """Note that the run goes on."""
        self._orphan_guard.hear()

    def end(self) -> None:
        """End the process as `ray.kill` does, but without Ray's GCS."""
        end_process()

    @ray.method(concurrency_group="life")
    def live(self) -> None:
        """Never return: the end of this call reports the end of the process."""
        threading.Event().wait()


def detached(run_name: str, kind: type, name: str, **options: Any) -> Any:
    """The class of a named actor of a run, whose `remote` starts it; `options` are Ray's."""
    return _remote_class(kind).options(
        name=f"{run_name}:{name}",
        namespace=NAMESPACE,
        lifetime="detached",
        max_restarts=0,
        enable_task_events=False,  # nothing reads events of single calls, and they cost time
        **options,
    )


@cache
def _remote_class(kind: type) -> Any:
    """Ray pickles and exports a class again for each call of `ray.remote`."""
    return ray.remote(concurrency_groups=getattr(kind, "GROUPS", {}))(kind)
