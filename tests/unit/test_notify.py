"""Webhook notices to a real server: their moments, their number, and the secrecy of the URL."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from written_runs import WrittenRun

from elastic.protocol.notes import Waited
from pipelines.errors import UserError
from pipelines.observe.history.history import read_history
from pipelines.observe.sidecar.notify import MAX_TRIES, Notifier, check_url
from pipelines.observe.sidecar.sidecar import Sidecar
from pipelines.run.plan import TrainRequest, make_plan, store_recipe

SECRET = "T0P-s3cret"


@dataclass
class Webhook:
    """A server that records posts and answers with each of `answers` in turn, then with 200."""

    answers: list[int] = field(default_factory=list)
    posted: list[dict[str, Any]] = field(default_factory=list)
    num_requests: int = 0
    url: str = ""


@pytest.fixture
def webhook() -> Iterator[Webhook]:
    webhook = Webhook()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            webhook.num_requests += 1
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            status = webhook.answers.pop(0) if webhook.answers else 200
            if status == 200:
                assert self.headers["Content-Type"] == "application/json"
                webhook.posted.append(body)
            self.send_response(status)
            if status == 302:
                self.send_header("Location", "/elsewhere")
            self.end_headers()

        def do_GET(self) -> None:
            raise AssertionError("it followed a redirect")

        def log_message(self, *arguments: object) -> None:
            """Suppress the log of the server."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    webhook.url = f"http://127.0.0.1:{server.server_port}/hooks/{SECRET}"
    yield webhook
    server.shutdown()
    server.server_close()
    thread.join()


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def write_waiting_run(path: Path) -> WrittenRun:
    run = WrittenRun(path / "run")
    run.start(2, steps=10)
    run.commit()
    run.append_command(Waited("0 of at least 1 workers are ready"))
    return run


def test_long_wait_is_posted_once(webhook: Webhook, tmp_path: Path) -> None:
    run, clock = write_waiting_run(tmp_path), Clock()
    notifier = Notifier(run.folder, webhook.url, after_s=600.0, clock=clock)

    def look_after(later_s: float) -> int:
        clock.now += later_s
        notifier.look(read_history(run.folder))
        return len(webhook.posted)

    assert [
        look_after(0.0),
        look_after(599.0),
        look_after(1.0),
        look_after(5.0),
        look_after(9999.0),
    ] == [0, 0, 1, 1, 1]
    [notice] = webhook.posted
    assert (
        notice["text"] == "run run has been waiting for 10 min: 0 of at least 1 workers are ready"
    )
    assert (notice["event"], notice["run"], notice["step"], notice["waited_s"]) == (
        "waiting",
        "run",
        1,
        600,
    )
    assert notice["folder"] == run.folder.url
    run.now += 1.0
    run.resume("w0")
    run.commit()
    assert look_after(9999.0) == 1
    run.now += 1.0
    run.append_command(Waited("0 of at least 1 workers are ready"))
    assert [look_after(0.0), look_after(601.0)] == [1, 2], "a second wait is posted again"


def test_end_of_a_run_is_posted_again_after_failures(webhook: Webhook, tmp_path: Path) -> None:
    run = write_waiting_run(tmp_path)
    run.stop("failed", "w0 raised ValueError: no")
    webhook.answers = [500, 302, 503]
    notifier = Notifier(run.folder, webhook.url, after_s=600.0)
    assert notifier.finish(read_history(run.folder), patience_s=30.0) is None
    [notice] = webhook.posted
    assert (notice["event"], notice["outcome"]) == ("stopped", "failed")
    assert notice["text"] == "run run failed at step 1: w0 raised ValueError: no"
    assert webhook.num_requests == 4


def test_failing_webhook_is_given_up_after_a_few_tries(webhook: Webhook, tmp_path: Path) -> None:
    run = write_waiting_run(tmp_path)
    webhook.answers = [500] * 99
    notifier = Notifier(run.folder, webhook.url, after_s=0.0)
    problem = notifier.finish(read_history(run.folder), patience_s=30.0)
    assert webhook.num_requests == MAX_TRIES
    assert (
        problem == "--notify: the notice of the run's end did not reach 127.0.0.1 (it answered 500)"
    )


def test_webhook_without_a_listener_is_reported_without_an_exception(tmp_path: Path) -> None:
    run = write_waiting_run(tmp_path)
    run.stop()
    notifier = Notifier(run.folder, f"http://127.0.0.1:1/{SECRET}", after_s=0.0)
    problem = notifier.finish(read_history(run.folder), patience_s=0.5)
    assert problem and "Connection refused" in problem and SECRET not in problem


@pytest.mark.parametrize(
    "url",
    [
        f"ftp://host/{SECRET}",
        f"file:///{SECRET}",
        SECRET,
        f"http:///{SECRET}",
        f"https://user:{SECRET}@host/",
        f"http://host:port/{SECRET}",
        f"http://host/{SECRET}\r\nX-Header: 1",
        f"http://[host/{SECRET}",
    ],
)
def test_invalid_url_is_refused_and_not_shown(url: str) -> None:
    with pytest.raises(UserError, match="--notify") as refused:
        check_url(url)
    assert SECRET not in str(refused.value)


def test_webhook_url_is_in_no_file_of_the_run_and_in_no_output(
    webhook: Webhook, tmp_path: Path
) -> None:
    request = TrainRequest("tiny", "run", str(tmp_path), data="random", notify=webhook.url)
    plan = make_plan(request, num_gpus=0)
    store_recipe(plan)
    assert SECRET not in repr(request) and SECRET not in repr(plan)
    run = WrittenRun(tmp_path / "run")
    run.start(1, steps=3)
    run.commit()
    run.stop()
    [factory] = plan.run.observers
    observer = factory.make()
    assert isinstance(observer, Sidecar)
    observer.poll()
    assert observer.finish(patience_s=60.0) is None
    assert [notice["event"] for notice in webhook.posted] == ["stopped"]
    for file in tmp_path.rglob("*"):
        assert file.is_dir() or SECRET.encode() not in file.read_bytes(), file
