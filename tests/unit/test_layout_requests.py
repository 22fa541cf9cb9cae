"""Asking a shell for another layout, from another thread, at the awkward moments."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path

from users_policy import users_policy

from actors.controller.fleet import answered
from actors.controller.layout_requests import LayoutReply, ask_for_layout
from actors.controller.shell import Shell
from actors.storage.lease import claim
from actors.storage.storage import DiskStorage
from elastic.geometry.target_layout import TargetLayout
from elastic.geometry.training_job import Job
from elastic.protocol.commands import Order
from elastic.protocol.events import RunOpened, StopRequested, StoreReady, WorkerLost, WorkerReady

PATIENCE_S = 20.0


class EmptyFleet:
    """Nobody ever starts; what shall happen the test posts."""

    def start_store(self) -> None:
        pass

    def start_workers(self, workers: Sequence[str], quarantined: Sequence[str] = ()) -> None:
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


def shell_of(folder: Path) -> tuple[Shell, threading.Thread]:
    """A shell, and the thread that is to drive it."""
    run = DiskStorage(folder)
    lease = claim(run)
    shell = Shell(run, lease)
    target_layout = TargetLayout.parse("dp=2", max_workers=2)
    opening = RunOpened(0, users_policy(2, 2), target_layout, Job(8, steps=10))
    return shell, threading.Thread(target=shell.run, args=(EmptyFleet(), opening))


@contextmanager
def driven(folder: Path) -> Iterator[Shell]:
    shell, thread = shell_of(folder)
    thread.start()
    shell.opened.wait(PATIENCE_S)
    try:
        yield shell
    finally:
        shell.post(StopRequested("enough"))
        thread.join()


def test_who_asks_before_the_run_is_opened_is_answered_by_this_session(tmp_path: Path) -> None:
    with driven(tmp_path):
        pass  # the journal now tells of a session that has stopped
    [file] = (tmp_path / "lease").iterdir()
    file.write_text(json.dumps({**json.loads(file.read_text()), "released": True}))
    shell, thread = shell_of(tmp_path)
    replies: list[LayoutReply] = []
    asking = threading.Thread(
        target=lambda: replies.append(
            ask_for_layout(shell, TargetLayout.parse("fsdp=2"), PATIENCE_S)
        )
    )
    asking.start()
    asking.join(0.3)
    assert not replies
    thread.start()
    asking.join(PATIENCE_S)
    shell.post(StopRequested("enough"))
    thread.join()
    [reply] = replies
    assert reply.answered is not None
    assert (reply.answered.present, reply.answered.planned) == ("", "fsdp=2")
    assert not reply.ended


def test_who_asks_a_run_that_has_ended_hears_so_at_once(tmp_path: Path) -> None:
    with driven(tmp_path) as shell:
        pass
    reply = ask_for_layout(shell, TargetLayout.parse("fsdp=2"), PATIENCE_S)
    assert reply.ended and reply.answered is None


def test_a_refusal_comes_back_with_its_reason(tmp_path: Path) -> None:
    with driven(tmp_path) as shell:
        reply = ask_for_layout(shell, TargetLayout.parse("fsdp=3"), PATIENCE_S)
    assert reply.answered is not None and "needs 3 workers" in reply.answered.refusal


def test_who_waits_for_a_change_hears_of_the_end(tmp_path: Path) -> None:
    """And who does not wait so long, how far the request has come."""
    with driven(tmp_path) as shell:
        events = [StoreReady("host", 1), *(WorkerReady(w, "node", 1) for w in ("w0", "w1"))]
        end = [*(WorkerLost(w, "killed") for w in ("w0", "w1")), StopRequested("enough")]
        for event in events:
            shell.post(event)
        late = ask_for_layout(shell, TargetLayout.parse("fsdp=2"), 0.1)
        timer = threading.Timer(0.3, lambda: [shell.post(event) for event in end])
        timer.start()
        reply = ask_for_layout(shell, TargetLayout.parse("fsdp=2"), PATIENCE_S)
        timer.join()
    for one in (late, reply):
        assert one.answered is not None and not one.layout
        assert (one.answered.present, one.answered.planned) == ("dp=2", "fsdp=2")
    assert not late.is_done
    assert reply.ended
