"""Nodes join and die under a script with `ElasticTrainer`, as in Ray's acceptance of elasticity.

python acceptance_script.py STORAGE FOLDER
"""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import loops
import psutil
import ray
from ray.cluster_utils import Cluster
from ray.train import RunConfig, ScalingConfig
from torch import nn

from pipelines.api import ElasticTrainer
from pipelines.api.live_run import LiveRun
from pipelines.loop import Run

STEP_S = 0.3
PATIENCE_S = 120.0


def train(run: Run) -> None:
    model, optimizer, _, loader = loops.build_training(is_scheduled=False)
    model, optimizer, loader = run.prepare(model, optimizer, loader)
    for step in run.steps(10_000, microbatches=loops.NUM_MICROBATCHES):
        with step:
            time.sleep(STEP_S)
            for points, labels in step.batches():
                step.backward(nn.functional.cross_entropy(model(points), labels))


def plain_losses(num_steps: int) -> list[float]:
    model, optimizer, _, loader = loops.build_training(is_scheduled=False)
    return list(loops.plain(model, optimizer, None, loader, num_steps, loops.NUM_MICROBATCHES))


def wait_until(condition: Callable[[], bool], awaited: str, run: LiveRun) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline and not run.is_over, f"{awaited}: {run!r}"
        time.sleep(0.2)


def await_training(run: LiveRun, num_workers: int) -> int:
    """Wait for two steps of so many workers; returns the latest step."""

    def trains() -> bool:
        metrics = run.metrics
        return len(metrics) > 1 and list(metrics["world_size"][-2:]) == [num_workers] * 2

    wait_until(trains, f"steps of {num_workers} workers", run)
    return int(run.metrics["step"].iloc[-1])


def kill(node: Any) -> None:
    """Kill a node's raylet first, so that it cannot report the other deaths."""
    [info] = list(node.all_processes["raylet"])
    raylet = psutil.Process(info.process.pid)
    for process in [raylet, *raylet.children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGKILL)


def follow_schedule(cluster: Cluster, run: LiveRun) -> list[tuple[str, int]]:
    """The step after each event."""
    seen = []
    time.sleep(3.0)
    assert not len(run.metrics), "no node has a CPU, but a step has committed"
    nodes = [cluster.add_node(num_cpus=1)]
    seen.append(("0 to 1 worker", await_training(run, 1)))
    nodes.append(cluster.add_node(num_cpus=2))
    seen.append(("1 to 3 workers", await_training(run, 3)))
    kill(nodes.pop())
    seen.append(("a node dies", await_training(run, 1)))
    kill(nodes.pop())
    time.sleep(5.0)
    nodes += [cluster.add_node(num_cpus=1) for _ in range(3)]
    seen.append(("all have died, 3 nodes join", await_training(run, 3)))
    nodes.append(cluster.add_node(num_cpus=2))
    seen.append(("3 to 5 workers", await_training(run, 5)))
    return seen


def main() -> None:
    storage, folder = sys.argv[1:]
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "temp_dir": folder})
    ray.init(cluster.address)
    trainer = ElasticTrainer(
        train,
        scaling_config=ScalingConfig(num_workers=(1, 5)),
        run_config=RunConfig(name="schedule", storage_path=storage),
        set={"checkpoint.every": 1, "growth.start_timeout_s": 5},
        verbose=0,
    )
    try:
        with trainer.start() as run:
            seen = follow_schedule(cluster, run)
            table = run.stop().metrics_dataframe
        rows = table[["step", "loss", "world_size"]].to_dict(orient="records")
        print(
            json.dumps({"seen": seen, "rows": rows, "plain": plain_losses(len(set(table["step"])))})
        )
    finally:
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    main()
