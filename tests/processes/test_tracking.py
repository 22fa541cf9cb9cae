"""Tracking in MLflow: the default store, and a real server that dies and restarts."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event

import pytest
from mlflow import MlflowClient
from mlflow.entities import Run
from written_runs import WrittenRun, append

from elastic.protocol.events import Evaluated
from pipelines.observe.history.run_folder import RunFolder, default_tracking_uri
from pipelines.observe.tracking.delivered import Delivered
from pipelines.observe.tracking.rows import params
from pipelines.observe.tracking.store import KEY_TAG, connect, prepare_process
from pipelines.observe.tracking.tracker import FIRST_REPORT_S, Tracker


@pytest.fixture(scope="module")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty default store, created once, since MLflow takes seconds for it."""
    folder = RunFolder.of(tmp_path_factory.mktemp("template"), "run")
    prepare_process()
    connect(default_tracking_uri(folder.storage), folder)
    return Path(folder.storage) / "mlflow.db"


@pytest.fixture
def storage(tmp_path: Path, empty_store: Path) -> Path:
    shutil.copy(empty_store, tmp_path)
    return tmp_path


def only_run(uri: str, experiment: str = "elastic") -> tuple[MlflowClient, Run]:
    client = MlflowClient(uri)
    found_experiment = client.get_experiment_by_name(experiment)
    assert found_experiment is not None
    [run] = client.search_runs([found_experiment.experiment_id])
    return client, run


def history_of(client: MlflowClient, run: Run, name: str) -> list[tuple[int, float]]:
    return sorted((m.step, m.value) for m in client.get_metric_history(run.info.run_id, name))


def store_recipe(run: WrittenRun, recipe: dict[str, object]) -> None:
    run.folder.files.write("recipe.json", json.dumps(recipe).encode())


def write_run_with_events(path: Path) -> WrittenRun:
    run = WrittenRun(path)
    (run.folder.path / "recipe.json").write_text(
        json.dumps({"model": {"dim": 64}, "steps": 12, "betas": [0.9]})
    )
    run.start(4, steps=12)
    for number in range(8):
        run.commit(loss=None if number == 3 else 5.0 - number)
        run.sample("w0")
    run.lose("w3", "connection reset")
    run.roll_back(6)
    run.now += 0.25
    run.resume("w0", "w1", "w2")
    run.append_event(Evaluated(2, 6, 4.5, (("accuracy", 0.75),)))
    for _ in range(4):
        run.commit(loss=1.0)
    return run


def test_default_store_gets_the_whole_run(tmp_path: Path) -> None:
    run = write_run_with_events(tmp_path / "100.1-a_b")
    tracker = Tracker(run.folder)
    tracker.poll()
    client, row = only_run(default_tracking_uri(tmp_path))
    assert row.info.status == "RUNNING"
    run.stop()
    assert tracker.finish(patience_s=20) is None

    client, row = only_run(default_tracking_uri(tmp_path))
    assert row.info.status == "FINISHED"
    assert row.info.run_name == "100.1-a_b"
    assert row.data.params == {"model.dim": "64", "steps": "12", "betas": "[0.9]"}
    assert row.data.tags["elastic.workers_lost"] == "1"
    assert "w3 lost: connection reset" in row.data.tags["mlflow.note.content"]
    steps = [step for step, _ in history_of(client, row, "loss")]
    assert steps == [1, 2, 3, 5, 6, 7, 7, 8, 8, 9, 10], (
        "repeated steps twice, the skipped step not at all"
    )
    assert row.data.metrics["tokens_per_s"] == pytest.approx(10_000)
    assert history_of(client, row, "workers_lost") == [(8, 1.0)]
    assert history_of(client, row, "recovery_s") == [(6, pytest.approx(0.25))]
    assert history_of(client, row, "eval_loss") == [(6, 4.5)]
    assert history_of(client, row, "eval_accuracy") == [(6, 0.75)]
    parts = {"compute_s": 1.0, "redone_s": 0.2, "paused_s": 0.25, "waiting_s": 0.5}
    shares = {"goodput": 1.0 / 1.95, "worker_hours": (3 * 1.95 + 1.3) / 3600}
    for name, value in {**parts, **shares}.items():
        assert history_of(client, row, name) == [(10, pytest.approx(value))]
    assert len(history_of(client, row, "system/w0/host_memory_usage_megabytes")) == 8
    assert "system/w0/device_utilization_percentage" not in row.data.metrics
    assert row.info.end_time == int(run.now * 1000)
    files = {file.path for file in client.list_artifacts(row.info.run_id)}
    assert files == {"events.json", "journal.jsonl", "recipe.json", "timeline.png"}
    assert (tmp_path / "mlflow-artifacts").is_dir()
    file = client.download_artifacts(row.info.run_id, "events.json", str(tmp_path))
    table = json.loads(Path(file).read_text())
    events = [dict(zip(table["columns"], event, strict=True)) for event in table["data"]]
    [lost] = [event for event in events if event["event"] == "lost"]
    assert (lost["worker"], lost["cause"], lost["step"]) == ("w3", "connection reset", 8)


def test_run_that_never_pauses_is_reported_while_it_runs(storage: Path) -> None:
    run = write_run_with_events(storage / "run")
    ahead_s = 0.0
    tracker = Tracker(run.folder, clock=lambda: time.monotonic() + ahead_s)
    tracker.poll()
    ahead_s = FIRST_REPORT_S
    is_over = Event()

    def commit_steps() -> None:
        while not is_over.is_set():
            run.commit()
            time.sleep(0.001)

    with ThreadPoolExecutor(1) as pool:
        writer = pool.submit(commit_steps)
        try:
            tracker.poll()
        finally:
            is_over.set()
        writer.result()
    client, row = only_run(tracker.uri)
    assert row.data.tags["elastic.workers_lost"] == "1"
    assert "timeline.png" in {file.path for file in client.list_artifacts(row.info.run_id)}


def test_resumed_run_continues_the_same_mlflow_run(storage: Path) -> None:
    run = write_run_with_events(storage / "run")
    run.stop("interrupted", "SIGTERM")
    assert Tracker(run.folder).finish(patience_s=20) is None
    client, first = only_run(default_tracking_uri(storage))
    assert first.info.status == "KILLED"

    run.now += 3600
    (run.folder.path / "recipe.json").write_text(
        json.dumps({"model": {"dim": 64}, "steps": 20, "seed": 1})
    )
    run.start(2, steps=20)
    tracker = Tracker(run.folder)
    tracker.poll()
    assert client.get_run(first.info.run_id).info.status == "RUNNING"
    run.commit(loss=0.5)
    run.stop("failed", "w0: boom")
    assert tracker.finish(patience_s=20) is None
    client, second = only_run(default_tracking_uri(storage))
    assert second.info.run_id == first.info.run_id
    assert second.info.status == "FAILED"
    assert second.data.params == {**first.data.params, "seed": "1"}
    assert second.data.tags["elastic.changed.steps"] == "20"
    assert history_of(client, second, "loss")[-1] == (11, 0.5)


def test_lost_offsets_duplicate_no_metric(storage: Path) -> None:
    """Invariant of the spool: a metric that is sent again is the same metric."""
    run = write_run_with_events(storage / "run")
    run.commit(step_s=60.0)
    run.stop()
    tracker = Tracker(run.folder)
    tracker.poll()
    client, before = only_run(tracker.uri)
    names = sorted(before.data.metrics)
    histories = [history_of(client, before, name) for name in names]
    known = Delivered.load(run.folder.files, tracker.uri, "elastic")
    Delivered(known.uri, known.experiment, known.key).save(run.folder.files)
    Tracker(run.folder).poll()
    client, after = only_run(tracker.uri)
    assert after.info.run_id == before.info.run_id
    assert [history_of(client, after, name) for name in names] == histories


def test_deleted_mlflow_run_is_delivered_as_a_new_one(storage: Path) -> None:
    run = write_run_with_events(storage / "run")
    tracker = Tracker(run.folder)
    tracker.poll()
    client, first = only_run(tracker.uri)
    client.delete_run(first.info.run_id)
    run.stop()
    assert Tracker(run.folder).finish(patience_s=20) is None
    client, second = only_run(tracker.uri)
    assert second.info.run_id != first.info.run_id
    assert len(history_of(client, second, "loss")) == 11


def test_late_answer_to_a_run_creation_leaves_no_second_run(storage: Path) -> None:
    run = write_run_with_events(storage / "run")
    tracker = Tracker(run.folder)
    tracker.poll()
    client, row = only_run(tracker.uri)
    key = Delivered.load(run.folder.files, tracker.uri, "elastic").key
    client.create_run(row.info.experiment_id, tags={KEY_TAG: key})
    run.stop()
    assert tracker.finish(patience_s=20) is None
    assert only_run(tracker.uri)[1].info.run_id == row.info.run_id


def test_run_without_lines_creates_no_mlflow_run(tmp_path: Path) -> None:
    run = WrittenRun(tmp_path / "run")
    tracker = Tracker(run.folder)
    tracker.poll()
    assert tracker.finish(patience_s=0) is None
    assert not (tmp_path / "mlflow.db").exists()


def test_params_respect_the_limits_of_mlflow() -> None:
    logged = params({"data": {"files": ["x" * 9000], "none": {}}, "odd key!": True})
    assert logged["odd key_"] == "True"
    assert logged["data.none"] == "{}"
    assert len(logged["data.files"]) == 6000


def test_secrets_of_a_url_are_not_stored(tmp_path: Path) -> None:
    run = write_run_with_events(tmp_path / "run")
    tracker = Tracker(run.folder, f"http://me:hunter2@127.0.0.1:{find_free_port()}")
    missing = tracker.finish(patience_s=0)
    assert missing is not None
    assert (
        "hunter2" not in missing + run.folder.files.read("tracking.json").decode() + tracker.trouble
    )
    assert "20 lines" in missing
    assert "\n" not in missing


def find_free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@dataclass
class Server:
    """A real `mlflow server` with a SQLite store, which tests kill and start."""

    folder: Path
    port: int = field(default_factory=find_free_port)
    process: subprocess.Popen[bytes] | None = None

    @property
    def uri(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        store = f"sqlite:///{self.folder / 'server.db'}"
        command = [sys.executable, "-m", "mlflow", "server", "--workers", "1"]
        command += ["--backend-store-uri", store, "--port", str(self.port)]
        command += ["--artifacts-destination", str(self.folder / "artifacts")]
        self.process = subprocess.Popen(
            command,
            env={
                **os.environ,
                "MLFLOW_DISABLE_TELEMETRY": "true",
                "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",  # it leaves a folder behind
            },
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        deadline = time.monotonic() + 120
        while not self.answers():
            assert self.process.poll() is None, "the server has ended"
            assert time.monotonic() < deadline, "the server does not start"
            time.sleep(0.1)

    def answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.uri}/health", timeout=1) as answer:
                return answer.status == 200
        except (urllib.error.URLError, OSError):
            return False

    def signal(self, number: int) -> None:
        """Signal the server and its children, which have their own session."""
        assert self.process is not None
        os.killpg(self.process.pid, number)

    def kill(self) -> None:
        if self.process and self.process.poll() is None:
            self.signal(signal.SIGKILL)
            self.process.wait()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    mlflow_server = Server(tmp_path)
    mlflow_server.start()
    yield mlflow_server
    mlflow_server.kill()


@pytest.mark.slow
def test_frozen_and_killed_server_loses_and_duplicates_no_metric(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "2")
    run = write_run_with_events(tmp_path / "storage" / "run")
    tracker = Tracker(run.folder, server.uri)
    server.signal(signal.SIGSTOP)
    tracker.poll()
    assert "timeout" in tracker.trouble.lower() or "timed out" in tracker.trouble.lower()
    server.signal(signal.SIGCONT)
    poll_until_delivered(tracker, run)

    for number in range(300):
        run.commit(loss=float(number))
        if number == 100:
            tracker.poll()
            server.kill()
    start = time.monotonic()
    tracker.poll()
    assert tracker.trouble
    assert time.monotonic() - start < 3, "a dead server must not block the tracker"
    missing = tracker.finish(patience_s=0.5)
    assert missing is not None
    assert f"MLflow at {server.uri} still lacks" in missing

    server.start()
    run.stop()
    assert Tracker(run.folder, server.uri).finish(patience_s=120) is None
    client, row = only_run(server.uri)
    assert row.info.status == "FINISHED"
    losses = history_of(client, row, "loss")
    assert len(losses) == 11 + 300
    assert losses[-300:] == [(11 + number, float(number)) for number in range(300)]
    stamps = [m.timestamp for m in client.get_metric_history(row.info.run_id, "loss")]
    written = [
        json.loads(line) for line in b"".join(run.folder.metrics.blocks()).decode().splitlines()
    ]
    expected = [int(line["time"] * 1000) for line in written if line["loss"] is not None]
    assert sorted(stamps) == sorted(expected)
    assert "timeline.png" in {file.path for file in client.list_artifacts(row.info.run_id)}


def poll_until_delivered(tracker: Tracker, run: WrittenRun) -> None:
    deadline = time.monotonic() + 120
    size = len(b"".join(run.folder.metrics.blocks()))
    while json.loads(run.folder.files.read("tracking.json"))["metrics_offset"] < size:
        assert time.monotonic() < deadline, tracker.trouble
        tracker.poll()
        time.sleep(0.1)


def test_traces_and_statistics_are_delivered_once(storage: Path) -> None:
    run = write_run_with_events(storage / "run")
    groups = {"layers.0": {"grad_norm": 0.5, "update_ratio": None}, "odd:name": {"grad_norm": 2.0}}
    for step in (2, 4):
        line = {"time": run.now, "step": step, "generation": 1, "groups": groups}
        append(run.folder.statistics, line)
    run.folder.files.write("profiles/w0-g1-steps-2-3.json.gz", b"a trace")
    run.folder.files.write("profiles/.w1.1234.partial", b"half a")
    run.stop()
    assert Tracker(run.folder).finish(patience_s=20) is None
    client, row = only_run(default_tracking_uri(storage))
    assert history_of(client, row, "statistics/layers.0/grad_norm") == [(2, 0.5), (4, 0.5)]
    assert history_of(client, row, "statistics/odd_name/grad_norm") == [(2, 2.0), (4, 2.0)]
    assert "statistics/layers.0/update_ratio" not in row.data.metrics
    [trace] = client.list_artifacts(row.info.run_id, "profiles")
    assert (trace.path, trace.file_size) == ("profiles/w0-g1-steps-2-3.json.gz", 7)
    (run.folder.path / trace.path).write_bytes(b"changed since")
    assert Tracker(run.folder).finish(patience_s=20) is None
    [trace] = client.list_artifacts(row.info.run_id, "profiles")
    assert trace.file_size == 7, "the tracker does not send an artifact again"
