"""`elastic status`, `logs`, `--notify` and metrics of a run on a real Ray cluster."""

from __future__ import annotations

import json
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from command_line import Command, elastic, elastic_train

pytestmark = [pytest.mark.timeout(900), pytest.mark.slow]
TINY = ("tiny", "--data", "random", "--set", "dtype=float64")
SECRET = "T0P-s3cret"


@contextmanager
def webhook() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """The URL of a webhook, and the messages posted to it."""
    posted: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            posted.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *arguments: object) -> None:
            """Print nothing."""

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/{SECRET}", posted
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def scrape_metrics(command: Command) -> str:
    """The metrics that Prometheus would scrape from the only node of the command's cluster."""
    [file] = Path(command.ray_folder).glob("ray/session_2*/metrics_export_port_*")
    address = json.loads(next(command.folder.glob("lease/*-*")).read_text())["cluster"]
    url = f"http://{address.rpartition(':')[0]}:{file.read_text()}/metrics"
    with urllib.request.urlopen(url, timeout=10) as answer:
        return answer.read().decode()


@pytest.mark.soak
def test_status_logs_and_notifications_follow_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(
        "RAY_NODE_TYPE_NAME", "small"
    )  # the variable that an autoscaler sets on its machines

    def status(*options: str) -> str:
        ended = elastic("status", "run", "--storage", str(tmp_path), *options)
        assert (ended.returncode, ended.stderr) == (0, "")
        return ended.stdout

    train = (*TINY, "--workers", "2:2", "--steps", "100000", "--layout", "dp=2")
    faults = ("--inject", "kill worker 1 at step 20")
    with webhook() as (url, posted):
        with elastic_train(tmp_path, *train, *faults, "--notify", url) as command:
            command.wait_until(lambda: len(command.lines("Resume")) > 1, "the replacement")
            command.wait_for_step(len(command.metrics()) + 1)
            report = json.loads(status("--json"))
            assert report["phase"] == "training" and report["driver"]["pid"]
            members = {w["worker"]: (w["world_rank"], w["pid"]) for w in report["workers"]}
            assert members == {name: (rank, command.pid_of(name)) for rank, name in enumerate(
                command.lines("Resume")[-1]["workers"]
            )}  # fmt: skip
            assert report["goodput"]["waiting_s"] > 1.0 and report["goodput"]["compute_s"] > 0.0
            assert [row["place"] for row in report["worker_hours"]] == ["small"]
            status_page = status()
            assert "run · training" in status_page and "w1 lost: its process died" in status_page
            command.wait_until(
                lambda: "ray_elastic_workers{" in scrape_metrics(command), "the first metrics"
            )
            assert 'run="run"' in scrape_metrics(command)
            command.process.terminate()
            code, output = command.finish()
            assert code == 143, output
            assert SECRET not in output
            for file in (*tmp_path.rglob("*"), *Path(command.ray_folder).rglob("*")):
                assert not file.is_file() or SECRET.encode() not in file.read_bytes(), file
        assert (posted[-1]["event"], posted[-1]["outcome"]) == ("stopped", "interrupted")
        assert [message["event"] for message in posted].count("stopped") == 1
    report = json.loads(status("--json"))
    assert (report["phase"], report["driver"], report["workers"]) == ("interrupted", None, [])
    start = time.monotonic()
    assert "run · interrupted" in status("--watch")
    assert time.monotonic() - start < 60
    logs = elastic("logs", "run", "--worker", "w1", "--storage", str(tmp_path))
    assert logs.returncode == 0 and "w1 lost: its process died" in logs.stdout
