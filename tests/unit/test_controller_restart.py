"""A restarted controller of the same actor: lease, journal and metrics, without Ray."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from users_policy import users_policy

from actors.controller.fleet import answered
from actors.controller.shell import Shell
from actors.storage.errors import LeaseLost, RunTaken
from actors.storage.lease import Lease, claim, owner_of
from actors.storage.storage import DiskStorage
from elastic.geometry.target_layout import TargetLayout
from elastic.geometry.training_job import Job
from elastic.protocol.commands import (
    Form,
    Order,
    Pause,
    RecordStep,
    Reshard,
    Resume,
    SaveCheckpoint,
    StartWorkers,
    Stopped,
)
from elastic.protocol.controller_state import ControllerState
from elastic.protocol.events import (
    Event,
    GroupFormed,
    PartFailed,
    Paused,
    RunOpened,
    StateReady,
    StepCommitted,
    StopRequested,
    StoreReady,
    WorkerReady,
)
from elastic.protocol.votes import StepRecord, Vote

WORKERS = ("w0", "w1")
OPENING = RunOpened(
    0, users_policy(2, 2, save_timeout_s=0.1), TargetLayout.parse("dp=2", 2), Job(8, steps=1000)
)


class Died(BaseException):
    """Ends the controller, as SIGKILL would."""


class ObedientFleet:
    """Workers that obey at once; their controller may die when it sends a chosen order."""

    def __init__(
        self, dies_at: type | None = None, generation: int = 1, num_steps: int = 3
    ) -> None:
        self.shell: Shell
        self.sent: list[Order] = []
        self.attached: list[ControllerState] = []
        self.was_cleared = False
        self._dies_at = dies_at
        self._generation = generation
        self._num_steps = num_steps

    def start_store(self) -> None:
        self.shell.post(StoreReady("host", 1))

    def start_workers(self, command: StartWorkers) -> None:
        for worker in command.workers:
            self.shell.post(WorkerReady(worker, "node", 1))

    def send(self, workers: Iterable[str], order: Order) -> None:
        if type(order) is self._dies_at:
            raise Died
        self.sent.append(order)
        answers: list[Event] = []
        match order:
            case Form():
                answers = [GroupFormed(worker, order.generation) for worker in workers]
            case Reshard():
                answers = [StateReady(w, order.generation, 0, 0, 0.0, 1, 1, 2) for w in workers]
            case Resume():
                steps = range(1, self._num_steps + 1)
                answers = [commit_event(step, order.generation) for step in steps]
                answers.append(StopRequested("enough"))
            case Pause():
                answers = [Paused(w, order.generation, self._num_steps) for w in workers]
            case SaveCheckpoint():
                answers = [PartFailed(w, order.generation, order.step, "no disk") for w in workers]
        for answer in answers:
            self.shell.post(answer)

    def newest_generation(self) -> int:
        return self._generation

    def attach(self, state: ControllerState) -> None:
        self.attached.append(state)

    def end_survivors(self) -> None:
        self.was_cleared = True

    def stop_worker(self, worker: str) -> None:
        pass

    def start_snapshot_server(self, node: str) -> None:
        pass

    def query_snapshot_servers(self, nodes: Sequence[str], generation: int) -> None:
        pass

    def forget_snapshots(self, nodes: Sequence[str], generation: int, kept_generation: int) -> None:
        pass

    def probe(self, worker: str) -> Future[int]:
        return Future()

    def process_state(self, worker: str) -> Future[str]:
        return answered("runs")

    def close(self) -> None:
        pass


def commit_event(step: int, generation: int) -> StepCommitted:
    record = StepRecord(0.0, step, generation, 2, 1.0, 1, 0.1, 1.0, 0.5, skipped=False)
    return StepCommitted(generation, record, Vote(step, 1.0, 1, 1.0, 2))


def read_lines(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def read_event_names(folder: Path) -> list[str]:
    return [line["event"] for line in read_lines(folder, "journal.jsonl") if "event" in line]


def run_controller(folder: Path, fleet: ObedientFleet, actor: str = "actor") -> Stopped:
    run = DiskStorage(folder)
    fleet.shell = Shell(run, claim(run, actor=actor))
    return fleet.shell.run(fleet, OPENING, fleet)


def test_only_the_same_actor_claims_a_held_lease(tmp_path: Path) -> None:
    run = DiskStorage(tmp_path)
    first = claim(run, actor="a")
    with pytest.raises(RunTaken):
        claim(run, actor="b")
    with pytest.raises(RunTaken):
        claim(run)
    second, third = claim(run, actor="a"), claim(run, actor="a")
    assert [lease.since for lease in (first, second, third)] == [first.epoch] * 3
    third.release()
    assert claim(run, actor="a").since == first.epoch
    last: Lease = claim(run, actor="a")
    last.release()
    other_lease = claim(run, actor="b")
    assert other_lease.since == other_lease.epoch


def test_lease_of_a_dead_controller_is_kept_while_its_cluster_may_restart_it(
    tmp_path: Path,
) -> None:
    run = DiskStorage(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as cluster:
        address = f"127.0.0.1:{cluster.getsockname()[1]}"
        claim(run, address, "a")
        [lease_file] = (tmp_path / "lease").iterdir()
        content = json.loads(lease_file.read_text())
        # Another process has that pid.
        lease_file.write_text(json.dumps({**content, "started": 0.0}))
        with pytest.raises(RunTaken):
            claim(run, "127.0.0.1:1", "b")
        assert owner_of(run)
        os.utime(lease_file, (time.time() - 60.0,) * 2)
        assert owner_of(run) is None, "the controller has been away for too long"
        lease_file.write_text(json.dumps({**content, "started": 0.0}))
        assert claim(run, address, "b"), "the same cluster would have restarted it"
    claim(run, address, "b").stop_renewing()
    [lease_file] = (tmp_path / "lease").iterdir()
    content = json.loads(lease_file.read_text())
    lease_file.write_text(json.dumps({**content, "started": 0.0}))
    assert claim(run, "127.0.0.1:1", "c"), "that cluster is gone"


def test_restart_sends_the_order_that_was_not_sent(tmp_path: Path) -> None:
    with pytest.raises(Died):
        run_controller(tmp_path, ObedientFleet(dies_at=Reshard))
    fleet = ObedientFleet()
    stopped = run_controller(tmp_path, fleet)
    assert stopped.step == 3
    assert [type(order).__name__ for order in fleet.sent[:3]] == ["Form", "Reshard", "Resume"]
    assert {order.generation for order in fleet.sent[:3]} == {1}
    assert (
        read_event_names(tmp_path).count("RunOpened")
        == read_event_names(tmp_path).count("ControllerRestarted")
        == 1
    )
    assert [line["step"] for line in read_lines(tmp_path, "metrics.jsonl")] == [1, 2, 3]


def test_restart_writes_the_missing_lines_of_commands_and_steps(tmp_path: Path) -> None:
    """The line of a command or a step may be missing although that of its event is there."""
    with pytest.raises(Died):
        run_controller(tmp_path, ObedientFleet(dies_at=Resume))
    journal = tmp_path / "journal.jsonl"
    whole = journal.read_text().splitlines(keepends=True)
    cut = next(i for i, line in enumerate(whole) if '"command": "Resume"' in line)
    journal.write_text("".join(whole[:cut]) + whole[cut][:20])
    run_controller(tmp_path, ObedientFleet())
    commands = [line.get("command") for line in read_lines(tmp_path, "journal.jsonl")]
    assert commands.count("Resume") == 1
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:2]))
    run_controller(tmp_path, ObedientFleet())
    assert [line["step"] for line in read_lines(tmp_path, "metrics.jsonl")] == [1, 2, 3]


def test_step_that_only_the_metrics_contain_is_not_written_twice(tmp_path: Path) -> None:
    """An object store may have received the metrics but not yet the journal."""
    with pytest.raises(Died):
        run_controller(tmp_path, ObedientFleet(dies_at=Resume))
    record = dataclasses.asdict(commit_event(1, generation=1).record)
    (tmp_path / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    run_controller(tmp_path, ObedientFleet())
    assert [line["step"] for line in read_lines(tmp_path, "metrics.jsonl")] == [1, 2, 3]


def test_restart_reads_only_the_ends_of_the_files(tmp_path: Path) -> None:
    num_steps = 9000  # more than the journal holds back and more than the workers keep
    with pytest.raises(Died):
        run_controller(tmp_path, ObedientFleet(dies_at=Pause, num_steps=num_steps))
    for name, marker in (
        ("journal.jsonl", b'"ControllerState"'),
        ("metrics.jsonl", b'"step": 8990,'),
    ):
        content = (tmp_path / name).read_bytes()
        begin = content.rindex(b"\n", 0, content.rindex(marker))
        (tmp_path / name).write_bytes(b"!" * begin + content[begin:])
    fleet = ObedientFleet(num_steps=num_steps)
    assert run_controller(tmp_path, fleet).step == num_steps
    assert isinstance(fleet.sent[0], Resume), "all members have formed"
    remaining_lines = (tmp_path / "metrics.jsonl").read_bytes().split(b"\n")[1:-1]
    assert [json.loads(row)["step"] for row in remaining_lines] == list(range(8990, num_steps + 1))


def test_steps_that_the_journal_held_back_are_written_once(tmp_path: Path) -> None:
    """The workers report them again; the metrics have them already."""
    run = DiskStorage(tmp_path)
    fleet = ObedientFleet(num_steps=200)
    fleet.shell = Shell(run, claim(run, actor="actor"))
    send_order, new_leases = fleet.send, []

    def take_over() -> None:
        with fleet.shell.listening() as commands:
            while not new_leases:
                command = commands.get(timeout=60.0)
                if isinstance(command, RecordStep) and command.record.step == 200:
                    new_leases.append(claim(run, actor="actor"))

    def send(workers: Iterable[str], order: Order) -> None:
        if isinstance(order, Resume):
            threading.Thread(target=take_over).start()
            for step in range(1, 201):
                fleet.shell.post(commit_event(step, order.generation))
            return
        send_order(workers, order)

    fleet.send = send  # type: ignore[method-assign]
    with pytest.raises(LeaseLost):
        fleet.shell.run(fleet, OPENING, fleet)
    event_lines = [line for line in read_lines(tmp_path, "journal.jsonl") if line.get("event")]
    assert [line["event"] for line in event_lines].count("StepCommitted") == 1, (
        "the rest was held back"
    )
    assert [line["step"] for line in read_lines(tmp_path, "metrics.jsonl")] == list(range(1, 201))
    second_fleet = ObedientFleet(num_steps=200)
    assert run_controller(tmp_path, second_fleet).step == 200
    assert [line["step"] for line in read_lines(tmp_path, "metrics.jsonl")] == list(range(1, 201))


def test_ended_run_is_not_started_again(tmp_path: Path) -> None:
    stopped = run_controller(tmp_path, ObedientFleet())
    fleet = ObedientFleet()
    assert run_controller(tmp_path, fleet) == stopped
    assert fleet.was_cleared and not fleet.sent and not fleet.attached
    assert read_event_names(tmp_path).count("RunOpened") == 1


@pytest.mark.parametrize(("actor", "generation"), [("another", 1), ("actor", 2)])
def test_workers_unknown_to_the_journal_are_removed(
    tmp_path: Path, actor: str, generation: int
) -> None:
    """Workers of another actor, or of a generation that the journal of an object store lacks."""
    with pytest.raises(Died):
        run_controller(tmp_path, ObedientFleet(dies_at=Reshard))
    [lease_file] = (tmp_path / "lease").iterdir()
    content = json.loads(lease_file.read_text())
    lease_file.write_text(json.dumps({**content, "released": True}))
    fleet = ObedientFleet(generation=generation)
    run_controller(tmp_path, fleet, actor)
    assert fleet.was_cleared and not fleet.attached
    assert read_event_names(tmp_path).count("RunOpened") == 2
    first = next(order for order in fleet.sent if isinstance(order, Form))
    assert first.generation > generation, "a generation is never used again"
