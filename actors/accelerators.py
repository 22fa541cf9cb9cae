"""What a worker asks its cluster for: a CPU, or a GPU, of one type unless told otherwise."""

from __future__ import annotations

from typing import Any

import ray

from actors.ray_private import resources_that_may_come

PREFIX = "accelerator_type:"
"""Of the resource by which Ray tells a machine's type of accelerator."""


class NoSuchAccelerator(ValueError):
    """What was asked for is not to be had on this cluster; the message says what is."""


def choose_resources(wished: str) -> dict[str, Any]:
    """The options with which this cluster starts a worker.

    `wished` is `cpu`, `gpu` (of any types), a type such as `L4`, or `auto`: the one type of GPU
    that there is, or that the autoscaler may bring; without any a CPU. Raises `NoSuchAccelerator`.
    """
    known = ray.cluster_resources() | resources_that_may_come()
    types = sorted(name.removeprefix(PREFIX) for name in known if name.startswith(PREFIX))
    if wished == "cpu" or (wished == "auto" and "GPU" not in known):
        return {"num_cpus": 1}
    if wished == "gpu" or (wished == "auto" and not types):
        return {"num_cpus": 0, "num_gpus": 1}
    if wished == "auto" and len(types) > 1:
        raise NoSuchAccelerator(
            f"this cluster has {' and '.join(types)}, and a run uses one type: "
            f"--set accelerator={types[0]}, or accelerator=gpu for all of them"
        )
    if wished not in ("auto", *types):
        there = ", ".join(types) or "no types that Ray can tell"
        raise NoSuchAccelerator(f"--set accelerator={wished}: this cluster has {there}")
    return {
        "num_cpus": 0,
        "num_gpus": 1,
        "accelerator_type": types[0] if wished == "auto" else wished,
    }
