"""A controller of the same actor after its death: lease, journal and metrics, without Ray."""

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
    """In the place of SIGKILL."""


class Crew:
    """Workers that obey at once, and may let their controller die at a moment."""

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

    def start_workers(self, workers: Sequence[str], quarantined: Sequence[str] = ()) -> None:
        for worker in workers:
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
                answers = [committed(step, order.generation) for step in steps]
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

    def clear_away(self) -> None:
        self.was_cleared = True

    def stop_worker(self, worker: str) -> None:
        pass

    def start_snapshot_server(self, node: str) -> None:
        pass

    def query_snapshot_servers(self, nodes: Sequence[str], generation: int) -> None:
        pass

    def forget_snapshots(self, nodes: Sequence[str], generation: int) -> None:
        pass

    def probe(self, worker: str) -> Future[int]:
        return Future()

    def process_state(self, worker: str) -> Future[str]:
        return answered("runs")

    def close(self) -> None:
        pass


def committed(step: int, generation: int) -> StepCommitted:
    record = StepRecord(0.0, step, generation, 2, 1.0, 1, 0.1, 1.0, 0.5, skipped=False)
    return StepCommitted(generation, record, Vote(step, 1.0, 1, 1.0, 2))


def lines(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def events(folder: Path) -> list[str]:
    return [line["event"] for line in lines(folder, "journal.jsonl") if "event" in line]


def drive(folder: Path, crew: Crew, actor: str = "actor") -> Stopped:
    run = DiskStorage(folder)
    crew.shell = Shell(run, claim(run, actor=actor))
    return crew.shell.run(crew, OPENING, crew)


def test_only_the_same_actor_need_not_wait(tmp_path: Path) -> None:
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
    other = claim(run, actor="b")
    assert other.since == other.epoch


def test_a_dead_controller_is_waited_for_while_its_cluster_may_restart_it(tmp_path: Path) -> None:
    run = DiskStorage(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as cluster:
        address = f"127.0.0.1:{cluster.getsockname()[1]}"
        claim(run, address, "a")
        [held] = (tmp_path / "lease").iterdir()
        told = json.loads(held.read_text())
        held.write_text(json.dumps({**told, "started": 0.0}))  # another process has that number
        with pytest.raises(RunTaken):
            claim(run, "127.0.0.1:1", "b")
        assert owner_of(run)
        os.utime(held, (time.time() - 60.0,) * 2)
        assert owner_of(run) is None, "it has not come back for too long"
        held.write_text(json.dumps({**told, "started": 0.0}))
        assert claim(run, address, "b"), "on the same cluster one would know of it"
    claim(run, address, "b").let_go()
    [held] = (tmp_path / "lease").iterdir()
    told = json.loads(held.read_text())
    held.write_text(json.dumps({**told, "started": 0.0}))
    assert claim(run, "127.0.0.1:1", "c"), "that cluster is gone"


def test_it_goes_on_with_the_order_that_was_not_sent(tmp_path: Path) -> None:
    with pytest.raises(Died):
        drive(tmp_path, Crew(dies_at=Reshard))
    crew = Crew()
    stopped = drive(tmp_path, crew)
    assert stopped.step == 3
    assert [type(order).__name__ for order in crew.sent[:3]] == ["Form", "Reshard", "Resume"]
    assert {order.generation for order in crew.sent[:3]} == {1}
    assert events(tmp_path).count("RunOpened") == events(tmp_path).count("ControllerRestarted") == 1
    assert [line["step"] for line in lines(tmp_path, "metrics.jsonl")] == [1, 2, 3]


def test_lines_that_were_not_written_are_written(tmp_path: Path) -> None:
    """A command's line and a step's may be lacking when the event's stands."""
    with pytest.raises(Died):
        drive(tmp_path, Crew(dies_at=Resume))
    journal = tmp_path / "journal.jsonl"
    whole = journal.read_text().splitlines(keepends=True)
    cut = next(i for i, line in enumerate(whole) if '"command": "Resume"' in line)
    journal.write_text("".join(whole[:cut]) + whole[cut][:20])
    drive(tmp_path, Crew())
    told = [line.get("command") for line in lines(tmp_path, "journal.jsonl")]
    assert told.count("Resume") == 1
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:2]))
    drive(tmp_path, Crew())
    assert [line["step"] for line in lines(tmp_path, "metrics.jsonl")] == [1, 2, 3]


def test_a_step_that_only_the_metrics_tell_of_is_not_told_twice(tmp_path: Path) -> None:
    """An object store may have got the metrics, and not yet the journal."""
    with pytest.raises(Died):
        drive(tmp_path, Crew(dies_at=Resume))
    record = dataclasses.asdict(committed(1, generation=1).record)
    (tmp_path / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    drive(tmp_path, Crew())
    assert [line["step"] for line in lines(tmp_path, "metrics.jsonl")] == [1, 2, 3]


def test_a_restart_reads_only_the_ends_of_the_files(tmp_path: Path) -> None:
    num_steps = 9000  # beyond all that is held back, and all records that are kept
    with pytest.raises(Died):
        drive(tmp_path, Crew(dies_at=Pause, num_steps=num_steps))
    for name, marker in (
        ("journal.jsonl", b'"ControllerState"'),
        ("metrics.jsonl", b'"step": 8990,'),
    ):
        content = (tmp_path / name).read_bytes()
        begin = content.rindex(b"\n", 0, content.rindex(marker))
        (tmp_path / name).write_bytes(b"!" * begin + content[begin:])
    crew = Crew(num_steps=num_steps)
    assert drive(tmp_path, crew).step == num_steps
    assert isinstance(crew.sent[0], Resume), "all members have formed"
    rest = (tmp_path / "metrics.jsonl").read_bytes().split(b"\n")[1:-1]
    assert [json.loads(row)["step"] for row in rest] == list(range(8990, num_steps + 1))


def test_steps_that_the_journal_held_back_are_told_of_once(tmp_path: Path) -> None:
    """Their reports come again from the workers; the metrics have them already."""
    run = DiskStorage(tmp_path)
    crew = Crew(num_steps=200)
    crew.shell = Shell(run, claim(run, actor="actor"))
    original, taken = crew.send, []

    def take_over() -> None:
        with crew.shell.listening() as told:
            while not taken:
                command = told.get(timeout=60.0)
                if isinstance(command, RecordStep) and command.record.step == 200:
                    taken.append(claim(run, actor="actor"))

    def send(workers: Iterable[str], order: Order) -> None:
        if isinstance(order, Resume):
            threading.Thread(target=take_over).start()
            for step in range(1, 201):
                crew.shell.post(committed(step, order.generation))
            return
        original(workers, order)

    crew.send = send  # type: ignore[method-assign]
    with pytest.raises(LeaseLost):
        crew.shell.run(crew, OPENING, crew)
    kept = [line for line in lines(tmp_path, "journal.jsonl") if line.get("event")]
    assert [line["event"] for line in kept].count("StepCommitted") == 1, "the rest was held back"
    assert [line["step"] for line in lines(tmp_path, "metrics.jsonl")] == list(range(1, 201))
    again = Crew(num_steps=200)
    assert drive(tmp_path, again).step == 200
    assert [line["step"] for line in lines(tmp_path, "metrics.jsonl")] == list(range(1, 201))


def test_a_run_that_had_ended_is_not_begun_again(tmp_path: Path) -> None:
    stopped = drive(tmp_path, Crew())
    crew = Crew()
    assert drive(tmp_path, crew) == stopped
    assert crew.was_cleared and not crew.sent and not crew.attached
    assert events(tmp_path).count("RunOpened") == 1


@pytest.mark.parametrize(("actor", "generation"), [("another", 1), ("actor", 2)])
def test_what_the_journal_does_not_know_is_cleared_away(
    tmp_path: Path, actor: str, generation: int
) -> None:
    """Another actor's workers, or a generation of which an object store's journal lacks lines."""
    with pytest.raises(Died):
        drive(tmp_path, Crew(dies_at=Reshard))
    [held] = (tmp_path / "lease").iterdir()
    told = json.loads(held.read_text())
    held.write_text(json.dumps({**told, "released": True}))
    crew = Crew(generation=generation)
    drive(tmp_path, crew, actor)
    assert crew.was_cleared and not crew.attached
    assert events(tmp_path).count("RunOpened") == 2
