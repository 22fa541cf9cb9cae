"""Resources of a worker: a CPU, or a GPU of one type unless the user allows several."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ray
from ray.util import accelerators

PREFIX = "accelerator_type:"
"""The prefix of the resource by which Ray names a machine's type of accelerator."""


class NoSuchAccelerator(ValueError):
    """The cluster cannot provide the requested accelerator; the message says what to request."""


def choose_resources(requested: str) -> dict[str, Any]:
    """The actor options with which this cluster starts a worker.

    `requested` is `cpu`, `gpu` (of any type), a type that Ray knows such as `L4`, which an
    autoscaler may yet have to start, or `auto`: the only type of GPU present, else a CPU. Raises
    `NoSuchAccelerator`.
    """
    present = ray.cluster_resources()
    types = sorted(name.removeprefix(PREFIX) for name in present if name.startswith(PREFIX))
    if requested == "auto":
        requested = _choose_present(present, types)
    if requested == "cpu":
        return {"num_cpus": 1}
    if requested == "gpu":
        return {"num_cpus": 0, "num_gpus": 1}
    refuse_unknown(requested, types)
    return {"num_cpus": 0, "num_gpus": 1, "accelerator_type": requested}


def refuse_unknown(requested: str, types: Sequence[str] = ()) -> None:
    """Raise `NoSuchAccelerator` unless the request is `auto`, `cpu`, `gpu`, a type that Ray knows,
    or one of the cluster's own `types`."""
    known = {name for name in vars(accelerators).values() if isinstance(name, str)}
    if requested not in {"auto", "cpu", "gpu"} | known | set(types):
        raise NoSuchAccelerator(
            f"--set accelerator={requested}: Ray knows no accelerator of that name; use cpu, gpu, "
            f"or a type such as {', '.join(types) or 'L4'}"
        )


def _choose_present(present: dict[str, float], types: list[str]) -> str:
    if len(types) > 1:
        raise NoSuchAccelerator(
            f"this cluster has {' and '.join(types)}, and a run uses one type: "
            f"--set accelerator={types[0]}, or accelerator=gpu to mix them"
        )
    if present.get("GPU"):
        return types[0] if types else "gpu"
    if not present.get("CPU"):
        raise NoSuchAccelerator(
            "this cluster has neither CPUs nor GPUs now: choose what its autoscaler starts, "
            "e.g. --set accelerator=L4"
        )
    return "cpu"
