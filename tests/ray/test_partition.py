"""A network partition of a real Ray cluster: one side continues, the other cannot."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest
from command_line import ROOT, Command, ray_folder
from head import INHERITED, has_started, wait_for
from networks import Host, Switch, connect_hosts
from slow_run import assert_one_lineage, slow_run_arguments
from test_ray_snapshots import has_complete_snapshots

pytestmark = [pytest.mark.timeout(900), pytest.mark.soak]
CUT_S = 20.0
PORT = "6379"
RAY = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"]


@contextmanager
def node(host: Host, environment: dict[str, str], *words: str) -> Iterator[None]:
    """A node of the cluster."""
    log = Path(environment["RAY_TMPDIR"], f"{host.name}.log")
    node_options = ("--num-cpus", "2", "--node-ip-address", host.address)
    with log.open("w") as out:
        process = subprocess.Popen(
            [*host.enter, *RAY, *node_options, *words],
            stdout=out,
            stderr=out,
            env=environment,
            cwd=ROOT,
        )
    try:
        wait_for(lambda: has_started(process, log), "a machine")
        yield
    finally:
        process.kill()
        process.wait()


@contextmanager
def two_hosts(storage: Path, layout: str) -> Iterator[tuple[Command, Switch, Host]]:
    """Start a run with two workers on each host; yield it, the switch, and the host without the
    controller."""
    inherited = {name: value for name, value in os.environ.items() if name not in INHERITED}
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    train = [*slow_run_arguments(layout, "2:4"), "--storage", str(storage), "--run-name", "run"]
    with ExitStack() as stack:
        switch, [near, far] = stack.enter_context(connect_hosts(2))
        folder = stack.enter_context(ray_folder())
        environment = {**inherited, **token, "RAY_TMPDIR": folder, "PYTHONPATH": str(ROOT)}
        address = f"{near.address}:{PORT}"
        head = ("--head", "--port", PORT, "--include-dashboard", "false", "--temp-dir", folder)
        stack.enter_context(node(near, environment, *head))
        stack.enter_context(node(far, environment, "--address", address))
        process = subprocess.Popen(
            [*near.enter, sys.executable, "-m", "pipelines", "train", *train],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**environment, "RAY_ADDRESS": address},
            cwd=ROOT,
        )
        stack.callback(process.communicate)
        stack.callback(process.kill)
        yield Command(process, storage / "run", folder, address), switch, far


def members(command: Command) -> set[str]:
    resumes = command.lines("Resume")
    return set(resumes[-1]["workers"]) if resumes else set()


def far_workers(command: Command) -> dict[str, int]:
    """The workers that are not on the controller's node, with their process ids."""
    raylet = psutil.Process(command.controller_pid()).parent()
    return {
        line["worker"]: line["pid"]
        for line in command.lines("WorkerReady")
        if psutil.pid_exists(line["pid"]) and psutil.Process(line["pid"]).parent() != raylet
    }


@pytest.mark.parametrize("layout", ["dp=4", "fsdp=4"])
def test_one_side_of_a_partition_continues_and_the_other_is_fenced(
    tmp_path: Path, layout: str
) -> None:
    """One side continues with the whole state, or with half of it and snapshots of the rest."""
    with two_hosts(tmp_path, layout) as (command, switch, far):
        command.wait_until(lambda: len(members(command)) == 4, "four workers")
        if layout == "fsdp=4":
            command.wait_until(lambda: has_complete_snapshots(command, 1), "the first snapshots")
        command.wait_for_step(20)
        lost_pids = far_workers(command)
        assert len(lost_pids) == 2
        switch.pull(far)
        pulled_at = time.time()
        command.wait_until(
            lambda: not members(command) & lost_pids.keys(), "a generation of the others"
        )
        resume = command.lines("Resume")[-1]
        time.sleep(max(0.0, pulled_at + CUT_S - time.time()))
        steps_after_cut = [m for m in command.metrics() if m["generation"] == resume["generation"]]
        print(
            f"{layout}: {steps_after_cut[0]['time'] - pulled_at:.2f} s to the next committed step"
        )
        assert len(command.lines("Resume")) == 2 and len(steps_after_cut) > 10
        switch.plug_in(far)
        plugged_at = time.time()
        command.wait_until(
            lambda: not set(map(psutil.pid_exists, lost_pids.values())) & {True},
            "the end of the cut-off workers",
        )
        print(f"{layout}: {time.time() - plugged_at:.2f} s until the cut-off workers have ended")
        command.wait_until(lambda: len(members(command)) == 4, "four workers again")
        print(f"{layout}: {time.time() - plugged_at:.2f} s until they have been replaced")
        assert not members(command) & lost_pids.keys()
        assert set(far_workers(command)) <= members(command)
        command.wait_for_step(len(command.metrics()) + 10)
        command.process.terminate()
        code, output = command.finish()
        assert code == 143, output
    assert_one_lineage(command, max_repeated=1)
    for resume in command.lines("Resume")[1:]:
        assert not lost_pids.keys() & set(resume["workers"])
