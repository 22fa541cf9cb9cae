"""Ray's real autoscaler with the node types of `cluster.yaml`: a run grows with its cluster."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from command_line import PATIENCE_S, ROOT, Command, processes_of
from head import Head, start_head, wait_for
from ray.autoscaler._private.util import prepare_config
from slow_run import SETTINGS, assert_one_lineage
from test_job_submit import run_of_storage, storage_options

pytestmark = [pytest.mark.timeout(1200), pytest.mark.soak]
HEAD_ID = "fffffffffffffffffffffffffffffffffffffffffffffffffff00000"
HEAD_TYPE = "ray.head.default"
"""Id and type of the head in Ray's fake provider."""
ENVIRONMENT = {
    "RAY_enable_autoscaler_v2": "1",
    "RAY_FAKE_CLUSTER": "1",
    "AUTOSCALER_UPDATE_INTERVAL_S": "1",
    "RAY_CLOUD_INSTANCE_ID": HEAD_ID,
    "RAY_OVERRIDE_NODE_ID_FOR_TESTING": HEAD_ID,
    "PYTHONPATH": f"{ROOT}:{Path(__file__).parent}",
}
NOTICE_S = 60


def autoscaling(address: str, lacking: dict[str, str]) -> dict[str, Any]:
    """`cluster.yaml` with a provider that refuses the types in `lacking` until their file exists;
    idle machines are released sooner."""
    config: dict[str, Any] = prepare_config(yaml.safe_load((ROOT / "cluster.yaml").read_text()))
    types = config["available_node_types"]
    types[HEAD_TYPE] = {**types.pop(config["head_node_type"]), "max_workers": 0}
    config["head_node_type"] = HEAD_TYPE
    config["idle_timeout_minutes"] = 0.2
    config["docker"], config["auth"], config["file_mounts"] = {}, {}, {}
    config["provider"] = {
        "type": "external",
        "module": "scarce_cloud.ScarceProvider",
        "use_node_id_as_ip": True,
        "disable_node_updaters": True,
        "disable_launch_config_check": True,
        "launch_multiple": True,
        "head_node_id": HEAD_ID,
        "gcs_address": address,
        "lacking": lacking,
    }
    return config


def node_types(cluster: Head) -> list[str]:
    """The types of the machines besides the head."""
    types = []
    for process in processes_of(cluster.folder):
        with suppress(psutil.NoSuchProcess):  # the process has ended meanwhile
            if process.name() == "raylet":
                types.append(process.environ().get("RAY_NODE_TYPE_NAME", ""))
    return sorted(name for name in types if name)


def kill_node_of(pid: int) -> None:
    """Kill a worker and its raylet together, as if the machine were preempted."""
    worker = psutil.Process(pid)
    raylet = next(parent for parent in worker.parents() if parent.name() == "raylet")
    for process in (raylet, worker):
        os.kill(process.pid, signal.SIGKILL)


def train_command(storage: Path, workers: str, num_steps: int, *changes: str) -> list[str]:
    """A command that uses the installed sources: the nodes share one folder for working directories
    here, and each would overwrite those of the others."""
    arguments = ["tiny", "--workers", workers, "--steps", str(num_steps)]
    for setting in (*SETTINGS, "accelerator=L4", *changes):
        arguments += ["--set", setting]
    return ["python", "-m", "pipelines", "train", *arguments, *storage_options(storage)]


def wait_for_members(cluster: Head, run: Command, number: int) -> None:
    deadline = time.monotonic() + 2 * PATIENCE_S
    while num_members(run) != number:
        log = cluster.log("grows")
        assert cluster.details("grows")["status"] in ("PENDING", "RUNNING"), log
        assert time.monotonic() < deadline, log


def num_members(run: Command) -> int:
    resumes = run.lines("Resume")
    return len(resumes[-1]["workers"]) if resumes else 0


def wait_for_generation_without(run: Command, worker: str) -> dict[str, Any]:
    """Wait for the first generation without this worker, and ten steps more; return its resume."""

    def resume() -> dict[str, Any]:
        newest: dict[str, Any] = run.lines("Resume")[-1]
        return newest

    wait_for(lambda: worker not in resume()["workers"], f"a generation without {worker}")
    wait_for_ten_steps(run, resume())
    return resume()


def wait_for_ten_steps(run: Command, resume: dict[str, Any]) -> None:
    wait_for(lambda: run.metrics()[-1]["step"] >= resume["step"] + 10, "ten steps")


def drain_node_of(cluster: Head, run: Command, worker: str) -> None:
    [node] = [line["node"] for line in run.lines("WorkerReady") if line["worker"] == worker]
    options = ("--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "a test")
    options += ("--deadline-remaining-seconds", str(NOTICE_S))
    ended = cluster.ray("drain-node", "--address", cluster.address, "--node-id", node, *options)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_run_grows_drains_survives_a_node_loss_and_releases_all(tmp_path: Path) -> None:
    """Four spot machines come at once, two on demand later. One node is drained, one is killed with
    all its processes, and the autoscaler replaces them."""
    run = run_of_storage(tmp_path)
    capacity_file = tmp_path / "come"
    autoscaling_config = partial(autoscaling, lacking={"l4": str(capacity_file)})
    with start_head(0, autoscaling=autoscaling_config, **ENVIRONMENT) as cluster:
        cluster.submit("grows", None, *train_command(tmp_path, "2:6", 100_000))
        wait_for_members(cluster, run, 4)
        capacity_file.touch()
        wait_for_members(cluster, run, 6)
        assert node_types(cluster) == ["l4", "l4", *["l4-spot"] * 4]
        resume = run.lines("Resume")[-1]
        wait_for_ten_steps(run, resume)
        draining, victim = resume["workers"][-2:]
        drain_node_of(cluster, run, draining)
        resume_without_drained = wait_for_generation_without(run, draining)
        assert not [
            line for line in run.lines("Abort") if line["time"] < resume_without_drained["time"]
        ]
        kill_node_of(run.pid_of(victim))
        wait_for_generation_without(run, victim)
        cluster.ray("job", "stop", "grows")
        wait_for(lambda: run.lines("Stopped"), "the end")
        wait_for(lambda: not node_types(cluster), "the end of idle machines")
    [stopped] = run.lines("Stopped")
    assert stopped["outcome"] == "interrupted"
    assert victim in [line["worker"] for line in run.lines("WorkerLost")]
    assert [line["cause"] for line in run.lines("NodeDraining")] == ["Ray drains it"]
    assert_one_lineage(run)


def test_without_spot_capacity_only_the_rest_runs_on_demand(tmp_path: Path) -> None:
    """Ray's autoscaler requests the spot machines again and again; it takes on demand only what
    exceeds their `max_workers`."""
    run = run_of_storage(tmp_path)
    autoscaling_config = partial(autoscaling, lacking={"l4-spot": str(tmp_path / "never")})
    with start_head(0, autoscaling=autoscaling_config, **ENVIRONMENT) as cluster:
        for name, text in (
            ("auto", "choose what its autoscaler starts"),
            ("L5", "knows no accelerator of that name"),
        ):
            unknown = [*train_command(tmp_path, "2:6", 20), "--set", f"accelerator={name}"]
            cluster.submit(name, None, *unknown)
            assert cluster.await_end(name)["driver_exit_code"] == 2
            assert text in cluster.log(name)
        cluster.submit("lacking", None, *train_command(tmp_path, "2:6", 20))
        ended = cluster.await_end("lacking")
        assert ended["status"] == "SUCCEEDED", cluster.log("lacking")
    assert {len(line["workers"]) for line in run.lines("Resume")} == {2}


def test_refused_spot_machines_are_replaced_on_demand_and_come_back(tmp_path: Path) -> None:
    """All three workers run on demand, although the spot type could have four; once the cloud has
    spot machines again, they are exchanged at a step boundary."""
    run = run_of_storage(tmp_path)
    capacity_file = tmp_path / "come"
    autoscaling_config = partial(autoscaling, lacking={"l4-spot": str(capacity_file)})
    market = ("use=fallback", "on_demand_after_s=60", "retry_spot_after_s=60")
    changes = [f"market.{change}" for change in market]
    with start_head(0, autoscaling=autoscaling_config, **ENVIRONMENT) as cluster:
        cluster.submit("grows", None, *train_command(tmp_path, "2:3", 100_000, *changes))
        wait_for_members(cluster, run, 3)
        assert node_types(cluster) == ["l4"] * 3
        capacity_file.touch()
        on_spot = {"l4-spot"}
        wait_for(lambda: types_of_members(run) == on_spot, "an exchange", 0.5)
        wait_for_ten_steps(run, run.lines("Resume")[-1])
        cluster.ray("job", "stop", "grows")
        wait_for(lambda: run.lines("Stopped"), "the end")
    first, *_ = run.lines("MarketChosen")
    assert (first["market"], first["num_workers"]) == ("on-demand", 3)
    assert first["cause"] == "no spot machine came for 60 s"
    assert not run.lines("Abort") and not run.lines("RolledBack") and not run.lines("Warned")
    assert_one_lineage(run)


def types_of_members(run: Command) -> set[str]:
    """The node types of the members of the newest generation."""
    types = {line["worker"]: line["node_type"] for line in run.lines("WorkerReady")}
    return {types[worker] for worker in run.lines("Resume")[-1]["workers"]}
