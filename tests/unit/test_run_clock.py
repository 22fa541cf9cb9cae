"""The time of the run passes evenly if the wall clock of the host is wrong or is reset."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from users_policy import users_policy

from actors.controller.shell import Shell, ShellParts
from actors.controller.shell_parts import RunClock
from actors.storage.lease import claim
from actors.storage.storage import DiskStorage
from elastic.geometry.target_layout import TargetLayout
from elastic.geometry.training_job import Job
from elastic.protocol.commands import Order, StartWorkers, Stopped
from elastic.protocol.controller_state import ControllerState
from elastic.protocol.events import (
    NodeDraining,
    RunOpened,
    StopRequested,
    StoreReady,
    WorkerLost,
    WorkerReady,
)

BEHIND_S = 600.0
FORM_TIMEOUT_S = 0.4
PROMPT_S = 60.0
"""Bound for a busy machine; deadlines that wait for the wall clock take ten times as long."""
POLICY = users_policy(2, 2, form_timeout_s=FORM_TIMEOUT_S, collective_timeout_s=0.4, max_attempts=2)
OPENING = RunOpened(0, POLICY, TargetLayout.parse("dp=2", 2), Job(8, steps=10))


class ManualClocks:
    """The two clocks of a host, moved by the test."""

    def __init__(self, wall: float) -> None:
        self.wall_s, self.monotonic_s = wall, 50.0

    def wall(self) -> float:
        return self.wall_s

    def monotonic(self) -> float:
        return self.monotonic_s

    def wait(self, seconds: float) -> None:
        self.wall_s += seconds
        self.monotonic_s += seconds


@pytest.mark.parametrize("wall", [1000.0, 400.0, 5000.0])
def test_time_continues_from_the_journal_or_the_wall_clock(wall: float) -> None:
    clocks = ManualClocks(wall)
    clock = RunClock(1000.0, clocks.wall, clocks.monotonic)
    start = max(1000.0, wall)
    assert clock.now() == start
    for jump_s in (0.0, -3600.0, 3600.0):
        clocks.wall_s += jump_s
        before = clock.now()
        clocks.wait(2.0)
        assert clock.now() - before == pytest.approx(2.0)


@pytest.mark.parametrize("wall", [400.0, 1000.0])
def test_deadline_of_a_notice_is_relative_to_the_wall_clock_of_this_machine(wall: float) -> None:
    """For deadlines by the clock of another machine see `test_drains.py`."""
    clocks = ManualClocks(wall)
    clock = RunClock(1000.0, clocks.wall, clocks.monotonic)
    clocks.wait(30.0)
    notice = clock.on_this_clock(NodeDraining("n", clocks.wall_s + 120.0))
    assert isinstance(notice, NodeDraining)
    assert notice.deadline - clock.now() == pytest.approx(120.0)
    other = StopRequested("enough")
    assert clock.on_this_clock(other) is other


class SilentFleet:
    """Workers that start and then answer no order."""

    shell: Shell

    def start_store(self) -> None:
        self.shell.post(StoreReady("host", 1))

    def start_workers(self, command: StartWorkers) -> None:
        for worker in command.workers:
            self.shell.post(WorkerReady(worker, "node", 1))

    def stop_worker(self, worker: str) -> None:
        self.shell.post(WorkerLost(worker, "stopped"))

    def send(self, workers: Iterable[str], order: Order) -> None:
        pass

    def probe(self, worker: str) -> Future[int]:
        answer: Future[int] = Future()
        answer.set_result(1)
        return answer

    def process_state(self, worker: str) -> Future[str]:
        raise AssertionError("the workers answer every probe")

    def newest_generation(self) -> int:
        return 0

    def attach(self, state: ControllerState) -> None:
        pass

    def end_survivors(self) -> None:
        pass

    def close(self) -> None:
        pass


def run_controller(folder: Path, wall: Callable[[], float]) -> Stopped:
    run, fleet = DiskStorage(folder), SilentFleet()
    fleet.shell = Shell(run, claim(run, actor="actor"), parts=ShellParts(wall=wall))
    return fleet.shell.run(fleet, OPENING, fleet)


def read_journal(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("off_s", [-BEHIND_S, 0.0, BEHIND_S])
def test_deadlines_pass_on_a_host_with_a_wrong_clock(tmp_path: Path, off_s: float) -> None:
    """The journal is that of a controller that died during forming on a host with a right clock."""
    run_controller(tmp_path, time.time)
    journal = tmp_path / "journal.jsonl"
    whole = journal.read_text().splitlines(keepends=True)
    cut = next(i for i, line in enumerate(whole) if '"command": "Form"' in line)
    journal.write_text("".join(whole[: cut + 1]))
    [lease] = (tmp_path / "lease").iterdir()
    lease.write_text(json.dumps({**json.loads(lease.read_text()), "released": False}))
    last = json.loads(whole[cut])["time"]
    start = time.monotonic()
    stopped = run_controller(tmp_path, lambda: time.time() + off_s)
    assert stopped.outcome == "failed" and "Forming timed out" in stopped.reason
    assert time.monotonic() - start < PROMPT_S
    later = read_journal(tmp_path)[cut + 1 :]
    assert "ControllerRestarted" in [line.get("event") for line in later]
    times = [line["time"] for line in later]
    assert times == sorted(times) and times[0] >= last
    del times[0]  # the opening line has the time of the line before it
    assert times[-1] - times[0] < PROMPT_S
