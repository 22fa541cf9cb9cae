"""A network partition of a real Ray cluster: one side goes on, the other cannot."""

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
from networks import Host, Switch, networked
from test_ray_snapshots import are_protected
from unhurried import assert_one_lineage, unhurried

pytestmark = [pytest.mark.timeout(900), pytest.mark.soak]
CUT_S = 20.0
PORT = "6379"
RAY = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"]


@contextmanager
def node(host: Host, environment: dict[str, str], *words: str) -> Iterator[None]:
    """A node of the cluster."""
    log = Path(environment["RAY_TMPDIR"], f"{host.name}.log")
    at = ("--num-cpus", "2", "--node-ip-address", host.address)
    with log.open("w") as out:
        process = subprocess.Popen(
            [*host.enter, *RAY, *at, *words], stdout=out, stderr=out, env=environment, cwd=ROOT
        )
    try:
        wait_for(lambda: has_started(process, log), "a machine")
        yield
    finally:
        process.kill()
        process.wait()


@contextmanager
def two_hosts(storage: Path, layout: str) -> Iterator[tuple[Command, Switch, Host]]:
    """A run of two workers on each, the switch, and the host without the controller."""
    inherited = {name: value for name, value in os.environ.items() if name not in INHERITED}
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    train = [*unhurried(layout, "2:4"), "--storage", str(storage), "--run-name", "run"]
    with ExitStack() as stack:
        switch, [near, far] = stack.enter_context(networked(2))
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
def test_one_side_goes_on_and_the_other_can_do_no_harm(tmp_path: Path, layout: str) -> None:
    """One side goes on with the whole state, or with half of it and snapshots of the rest."""
    with two_hosts(tmp_path, layout) as (command, switch, far):
        command.wait_until(lambda: len(members(command)) == 4, "four workers")
        if layout == "fsdp=4":
            command.wait_until(lambda: are_protected(command, 1), "the first snapshots")
        command.wait_for_step(20)
        lost = far_workers(command)
        assert len(lost) == 2
        switch.pull(far)
        pulled = time.time()
        command.wait_until(lambda: not members(command) & lost.keys(), "the others go on")
        resume = command.lines("Resume")[-1]
        time.sleep(max(0.0, pulled + CUT_S - time.time()))
        in_time = [m for m in command.metrics() if m["generation"] == resume["generation"]]
        print(f"{layout}: {in_time[0]['time'] - pulled:.2f} s to the next committed step")
        assert len(command.lines("Resume")) == 2 and len(in_time) > 10
        switch.plug_in(far)
        plugged = time.time()
        command.wait_until(lambda: not set(map(psutil.pid_exists, lost.values())) & {True}, "them")
        print(f"{layout}: {time.time() - plugged:.2f} s until the cut-off workers have ended")
        command.wait_until(lambda: len(members(command)) == 4, "four workers again")
        print(f"{layout}: {time.time() - plugged:.2f} s until they have been replaced")
        assert not members(command) & lost.keys()
        assert set(far_workers(command)) <= members(command)
        command.wait_for_step(len(command.metrics()) + 10)
        command.process.terminate()
        code, output = command.finish()
        assert code == 143, output
    assert_one_lineage(command, most_redone=1)
    for resume in command.lines("Resume")[1:]:
        assert not lost.keys() & set(resume["workers"])
