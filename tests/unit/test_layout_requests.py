"""Layout requests to a shell from another thread: before it opens, at its end, with a timeout."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path

from users_policy import users_policy

from actors.controller.fleet import answered
from actors.controller.layout_requests import LayoutReply, send_layout_request
from actors.controller.shell import Shell
from actors.storage.lease import claim
from actors.storage.storage import DiskStorage
from elastic.geometry.target_layout import TargetLayout
from elastic.geometry.training_job import Job
from elastic.protocol.commands import Order, StartWorkers
from elastic.protocol.events import RunOpened, StopRequested, StoreReady, WorkerLost, WorkerReady

PATIENCE_S = 20.0


class EmptyFleet:
    """Starts no worker; the test posts all events."""

    def start_store(self) -> None:
        pass

    def start_workers(self, command: StartWorkers) -> None:
        pass

    def stop_worker(self, worker: str) -> None:
        pass

    def send(self, workers: Iterable[str], order: Order) -> None:
        pass

    def probe(self, worker: str) -> Future[int]:
        return Future()

    def process_state(self, worker: str) -> Future[str]:
        return answered("runs")

    def close(self) -> None:
        pass


def make_shell(folder: Path) -> tuple[Shell, threading.Thread]:
    """A shell, and the thread that will run it."""
    run = DiskStorage(folder)
    lease = claim(run)
    shell = Shell(run, lease)
    target_layout = TargetLayout.parse("dp=2", max_workers=2)
    opening = RunOpened(0, users_policy(2, 2), target_layout, Job(8, steps=10))
    return shell, threading.Thread(target=shell.run, args=(EmptyFleet(), opening))


@contextmanager
def running_shell(folder: Path) -> Iterator[Shell]:
    shell, thread = make_shell(folder)
    thread.start()
    shell.opened.wait(PATIENCE_S)
    try:
        yield shell
    finally:
        shell.post(StopRequested("enough"))
        thread.join()


def test_request_before_the_run_opens_is_answered_by_its_session(tmp_path: Path) -> None:
    with running_shell(tmp_path):
        pass  # the journal now contains a stopped session
    [file] = (tmp_path / "lease").iterdir()
    file.write_text(json.dumps({**json.loads(file.read_text()), "released": True}))
    shell, thread = make_shell(tmp_path)
    replies: list[LayoutReply] = []
    request_thread = threading.Thread(
        target=lambda: replies.append(
            send_layout_request(shell, TargetLayout.parse("fsdp=2"), PATIENCE_S)
        )
    )
    request_thread.start()
    request_thread.join(0.3)
    assert not replies
    thread.start()
    request_thread.join(PATIENCE_S)
    shell.post(StopRequested("enough"))
    thread.join()
    [reply] = replies
    assert reply.answered is not None
    assert (reply.answered.present, reply.answered.planned) == ("", "fsdp=2")
    assert not reply.ended


def test_request_to_an_ended_run_is_answered_at_once(tmp_path: Path) -> None:
    with running_shell(tmp_path) as shell:
        pass
    reply = send_layout_request(shell, TargetLayout.parse("fsdp=2"), PATIENCE_S)
    assert reply.ended and reply.answered is None


def test_refused_request_returns_the_reason(tmp_path: Path) -> None:
    with running_shell(tmp_path) as shell:
        reply = send_layout_request(shell, TargetLayout.parse("fsdp=3"), PATIENCE_S)
    assert reply.answered is not None and "needs 3 workers" in reply.answered.refusal


def test_waiting_request_returns_at_the_end_of_the_run_or_after_its_timeout(tmp_path: Path) -> None:
    """After its timeout a request returns how far it has come."""
    with running_shell(tmp_path) as shell:
        events = [StoreReady("host", 1), *(WorkerReady(w, "node", 1) for w in ("w0", "w1"))]
        end = [*(WorkerLost(w, "killed") for w in ("w0", "w1")), StopRequested("enough")]
        for event in events:
            shell.post(event)
        timed_out = send_layout_request(shell, TargetLayout.parse("fsdp=2"), 0.1)
        timer = threading.Timer(0.3, lambda: [shell.post(event) for event in end])
        timer.start()
        reply = send_layout_request(shell, TargetLayout.parse("fsdp=2"), PATIENCE_S)
        timer.join()
    for layout_reply in (timed_out, reply):
        assert layout_reply.answered is not None and not layout_reply.layout
        assert (layout_reply.answered.present, layout_reply.answered.planned) == ("dp=2", "fsdp=2")
    assert not timed_out.is_done
    assert reply.ended
