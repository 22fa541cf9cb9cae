"""What a worker asks its cluster for: a CPU, or a GPU, of one type unless told otherwise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ray
from ray.util import accelerators

PREFIX = "accelerator_type:"
"""Of the resource by which Ray tells a machine's type of accelerator."""


class NoSuchAccelerator(ValueError):
    """What was asked for is not to be had on this cluster; the message says how to ask."""


def choose_resources(requested: str) -> dict[str, Any]:
    """The options with which this cluster starts a worker.

    `wished` is `cpu`, `gpu` (of any types), a type that Ray knows such as `L4`, which an autoscaler
    may have yet to start, or `auto`: the one type of GPU that is there, else a CPU. Raises
    `NoSuchAccelerator`.
    """
    there = ray.cluster_resources()
    types = sorted(name.removeprefix(PREFIX) for name in there if name.startswith(PREFIX))
    if requested == "auto":
        requested = _found(there, types)
    if requested == "cpu":
        return {"num_cpus": 1}
    if requested == "gpu":
        return {"num_cpus": 0, "num_gpus": 1}
    refuse_unknown(requested, types)
    return {"num_cpus": 0, "num_gpus": 1, "accelerator_type": requested}


def refuse_unknown(requested: str, types: Sequence[str] = ()) -> None:
    """Raises `NoSuchAccelerator` for what is neither a word that we know, nor a type that Ray
    knows, nor one of the cluster's own `types`."""
    known = {name for name in vars(accelerators).values() if isinstance(name, str)}
    if requested not in {"auto", "cpu", "gpu"} | known | set(types):
        raise NoSuchAccelerator(
            f"--set accelerator={requested}: Ray knows of none of that name; write cpu, gpu, or a "
            f"type such as {', '.join(types) or 'L4'}"
        )


def _found(there: dict[str, float], types: list[str]) -> str:
    if len(types) > 1:
        raise NoSuchAccelerator(
            f"this cluster has {' and '.join(types)}, and a run uses one type: "
            f"--set accelerator={types[0]}, or accelerator=gpu for all of them"
        )
    if there.get("GPU"):
        return types[0] if types else "gpu"
    if not there.get("CPU"):
        raise NoSuchAccelerator(
            "this cluster has neither CPUs nor GPUs now: say what its autoscaler shall start, "
            "e.g. --set accelerator=L4"
        )
    return "cpu"
