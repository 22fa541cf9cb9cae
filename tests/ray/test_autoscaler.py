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
from head import Head, head, wait_for
from ray.autoscaler._private.util import prepare_config
from test_job_submit import files_of, place
from unhurried import SETTINGS, assert_one_history

pytestmark = [pytest.mark.timeout(1200), pytest.mark.soak]
HEAD_ID = "fffffffffffffffffffffffffffffffffffffffffffffffffff00000"
HEAD_TYPE = "ray.head.default"
"""Both as Ray's fake provider has them."""
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
    """`cluster.yaml` with another provider, which refuses these types of nodes until a file is
    there; idle machines go back sooner."""
    told: dict[str, Any] = prepare_config(yaml.safe_load((ROOT / "cluster.yaml").read_text()))
    types = told["available_node_types"]
    types[HEAD_TYPE] = {**types.pop(told["head_node_type"]), "max_workers": 0}
    told["head_node_type"] = HEAD_TYPE
    told["idle_timeout_minutes"] = 0.2
    told["docker"], told["auth"], told["file_mounts"] = {}, {}, {}
    told["provider"] = {
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
    return told


def node_types(cluster: Head) -> list[str]:
    """Of the machines that are there beside the head."""
    found = []
    for process in processes_of(cluster.folder):
        with suppress(psutil.NoSuchProcess):  # it is just ending
            if process.name() == "raylet":
                found.append(process.environ().get("RAY_NODE_TYPE_NAME", ""))
    return sorted(name for name in found if name)


def kill_node_of(pid: int) -> None:
    """SIGKILL a worker and its raylet together, as when the machine is taken."""
    worker = psutil.Process(pid)
    raylet = next(one for one in worker.parents() if one.name() == "raylet")
    for process in (raylet, worker):
        os.kill(process.pid, signal.SIGKILL)


def command(storage: Path, workers: str, num_steps: int) -> list[str]:
    """Of what is installed: the nodes share one folder for working directories here, and each
    unpacks them anew, under the feet of the others."""
    given = ["tiny", "--workers", workers, "--steps", str(num_steps)]
    for setting in (*SETTINGS, "accelerator=L4"):
        given += ["--set", setting]
    return ["python", "-m", "pipelines", "train", *given, *place(storage)]


def await_members(cluster: Head, files: Command, number: int) -> None:
    deadline = time.monotonic() + 2 * PATIENCE_S
    while num_members(files) != number:
        told = cluster.log("grows")
        assert cluster.details("grows")["status"] in ("PENDING", "RUNNING"), told
        assert time.monotonic() < deadline, told


def num_members(files: Command) -> int:
    resumes = files.lines("Resume")
    return len(resumes[-1]["workers"]) if resumes else 0


def await_without(files: Command, worker: str) -> dict[str, Any]:
    """The first generation that this one is not in, ten steps on."""

    def resume() -> dict[str, Any]:
        told: dict[str, Any] = files.lines("Resume")[-1]
        return told

    wait_for(lambda: worker not in resume()["workers"], f"the others go on without {worker}")
    await_ten_steps(files, resume())
    return resume()


def await_ten_steps(files: Command, resume: dict[str, Any]) -> None:
    wait_for(lambda: files.metrics()[-1]["step"] >= resume["step"] + 10, "ten steps")


def drain_node_of(cluster: Head, files: Command, worker: str) -> None:
    [node] = [line["node"] for line in files.lines("WorkerReady") if line["worker"] == worker]
    why = ("--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "a test")
    until = ("--deadline-remaining-seconds", str(NOTICE_S))
    told = cluster.ray("drain-node", "--address", cluster.address, "--node-id", node, *why, *until)
    assert told.returncode == 0, told.stdout + told.stderr


def test_a_run_grows_is_drained_survives_a_dead_machine_and_gives_all_back(tmp_path: Path) -> None:
    """Four machines on spot come at once, those on demand later; one is drained and left, one is
    SIGKILLed with all on it, and the autoscaler makes others."""
    files = files_of(tmp_path)
    come = tmp_path / "come"
    lacking = partial(autoscaling, lacking={"l4": str(come)})
    with head(0, autoscaling=lacking, **ENVIRONMENT) as cluster:
        cluster.submit("grows", None, *command(tmp_path, "2:6", 100_000))
        await_members(cluster, files, 4)
        come.touch()
        await_members(cluster, files, 6)
        assert node_types(cluster) == ["l4", "l4", *["l4-spot"] * 4]
        grown = files.lines("Resume")[-1]
        await_ten_steps(files, grown)
        leaver, victim = grown["workers"][-2:]
        drain_node_of(cluster, files, leaver)
        left = await_without(files, leaver)
        assert not [line for line in files.lines("Abort") if line["time"] < left["time"]]
        kill_node_of(files.pid_of(victim))
        await_without(files, victim)
        cluster.ray("job", "stop", "grows")
        wait_for(lambda: files.lines("Stopped"), "the end")
        wait_for(lambda: not node_types(cluster), "the end of idle machines")
    [stopped] = files.lines("Stopped")
    assert stopped["outcome"] == "interrupted"
    assert victim in [line["worker"] for line in files.lines("WorkerLost")]
    assert [line["cause"] for line in files.lines("NodeDraining")] == ["Ray drains it"]
    assert_one_history(files)


def test_where_spot_cannot_be_had_the_rest_is_on_demand(tmp_path: Path) -> None:
    """Ray's autoscaler asks for the spot machines again and again; what exceeds their
    `max_workers` is the part of a run that it takes on demand."""
    files = files_of(tmp_path)
    lacking = partial(autoscaling, lacking={"l4-spot": str(tmp_path / "never")})
    with head(0, autoscaling=lacking, **ENVIRONMENT) as cluster:
        for name, told in (
            ("auto", "choose what its autoscaler starts"),
            ("L5", "knows no accelerator of that name"),
        ):
            unknown = [*command(tmp_path, "2:6", 20), "--set", f"accelerator={name}"]
            cluster.submit(name, None, *unknown)
            assert cluster.await_end(name)["driver_exit_code"] == 2
            assert told in cluster.log(name)
        cluster.submit("lacking", None, *command(tmp_path, "2:6", 20))
        ended = cluster.await_end("lacking")
        assert ended["status"] == "SUCCEEDED", cluster.log("lacking")
    assert {len(line["workers"]) for line in files.lines("Resume")} == {2}
