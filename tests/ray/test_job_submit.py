"""`ray job submit` with token authentication: completed, stopped, resumed, refused."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from subprocess import PIPE, Popen

import pytest
from command_line import Command, read_lines
from head import Head, copy_working_tree, start_head, wait_for
from test_model_axes import SETTINGS, arguments

sys.path.append(str(Path(__file__).parents[1] / "processes"))

from expected import expected

from pipelines.run.recipes import load
from pipelines.settings.overrides import override

pytestmark = [pytest.mark.timeout(900), pytest.mark.slow]
NUM_STEPS = 300
NUM_COMPARED = 240
"""Rounding grows with the steps; see `test_controller_death.py`."""
SECRET = "hunter2-is-no-good-password"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Head]:
    secrets = {"MLFLOW_TRACKING_PASSWORD": SECRET, "AWS_SECRET_ACCESS_KEY": SECRET}
    with start_head(num_cpus=3, **secrets) as started:
        yield started
        started.await_end_of_actors()


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_working_tree(tmp_path_factory.mktemp("tree"))


def train(storage: Path, workers: str, steps: int, *options: str) -> list[str]:
    run = arguments("mine.py:small", "dp=2", workers, steps)
    return ["python", "-m", "pipelines", "train", *run, *options, *storage_options(storage)]


def storage_options(storage: Path) -> list[str]:
    return ["--storage", str(storage), "--run-name", "run"]


def run_of_storage(storage: Path) -> Command:
    """The run's files, as a command on this machine sees them."""
    return Command(Popen(["true"]), storage / "run", ray_folder="", address="")


def content_of(file: Path) -> bytes:
    return file.read_bytes() if file.is_file() else b""


def assert_equals_undisturbed_run(run: Command, num_steps: int) -> None:
    losses_and_norms, _ = expected(override(load("tiny"), SETTINGS), min(num_steps, NUM_COMPARED))
    metrics = run.metrics()
    assert [line["step"] for line in metrics] == list(range(1, num_steps + 1)), (
        "steps are repeated or lost"
    )
    losses = [loss for loss, _ in losses_and_norms][:NUM_COMPARED]
    assert [line["loss"] for line in metrics][:NUM_COMPARED] == pytest.approx(losses, rel=1e-9)


def test_job_with_a_killed_worker_succeeds(tmp_path: Path, cluster: Head, tree: Path) -> None:
    cluster.submit("killed", tree, *train(tmp_path, "1:3", NUM_STEPS))
    run = run_of_storage(tmp_path)
    wait_for(lambda: len(run.metrics()) >= 20, "step 20")
    os.kill(run.pid_of("w1"), signal.SIGKILL)
    ended = cluster.await_end("killed")
    log = cluster.log("killed")
    assert (ended["status"], ended["driver_exit_code"]) == ("SUCCEEDED", 0), log
    assert_equals_undisturbed_run(run, NUM_STEPS)
    assert [line["worker"] for line in run.lines("WorkerLost")] == ["w1"]
    lost = [line for line in log.splitlines() if "w1 lost: its process died" in line]
    assert len(lost) == 1, log
    assert "completed" in log and "\x1b" not in log
    assert len(log.splitlines()) < 60, "too many lines"
    leaks = [file for file in tmp_path.rglob("*") if SECRET.encode() in content_of(file)]
    assert SECRET not in log and cluster.environment["RAY_AUTH_TOKEN"] not in log
    assert not leaks


@pytest.mark.soak
def test_stopped_job_saves_a_checkpoint_and_resumes(
    tmp_path: Path, cluster: Head, tree: Path
) -> None:
    """The same name is submitted at once, while the stopped run may still be saving."""
    cluster.submit("stopped", tree, *train(tmp_path, "2:2", 100_000))
    run = run_of_storage(tmp_path)
    wait_for(lambda: len(run.metrics()) >= 20, "step 20")
    assert cluster.ray("job", "stop", "stopped").returncode == 0
    assert cluster.await_end("stopped")["status"] == "STOPPED"
    num_steps = len(run.metrics()) + 200
    cluster.submit("resumed", tree, *train(tmp_path, "2:2", num_steps))
    ended = cluster.await_end("resumed")
    assert ended["status"] == "SUCCEEDED", cluster.log("resumed")
    first, second = run.lines("Stopped")
    assert (first["outcome"], second["outcome"]) == ("interrupted", "completed")
    assert first["step"] in [line["step"] for line in run.lines("Checkpointed")]
    resharded = [line for line in run.lines("Resharded") if line["source"] == "checkpoint"]
    assert [line["step"] for line in resharded] == [first["step"]]
    assert not run.lines("RolledBack")
    assert_equals_undisturbed_run(run, num_steps)
    cluster.await_end_of_actors()


@pytest.mark.soak
def test_next_job_waits_for_a_run_with_a_killed_driver(
    tmp_path: Path, cluster: Head, tree: Path
) -> None:
    """The driver gets no signal: the controller notices, saves and ends; the next job resumes."""
    cluster.submit("silenced", tree, *train(tmp_path, "2:2", 100_000))
    run = run_of_storage(tmp_path)
    wait_for(lambda: len(run.metrics()) >= 20, "step 20")
    os.kill(int(cluster.details("silenced")["driver_info"]["pid"]), signal.SIGKILL)
    ended = cluster.await_end("silenced")
    assert ended["status"] == "FAILED"
    cluster.submit("after", tree, *train(tmp_path, "2:2", 100_000))
    wait_for(lambda: len(run.lines("RunOpened")) == 2, "the next one")
    [stopped] = run.lines("Stopped")
    assert (stopped["outcome"], stopped["reason"]) == ("interrupted", "the driver is gone")
    cluster.ray("job", "stop", "after")
    assert cluster.await_end("after")["status"] == "STOPPED"
    cluster.await_end_of_actors()


@pytest.mark.soak
def test_job_status_has_the_exit_code(tmp_path: Path, cluster: Head, tree: Path) -> None:
    bad = train(tmp_path, "1:1", 5, "--set", "optimizer.lrr=1")
    broken = train(tmp_path / "broken", "1:2", 50, "--inject", "raise in worker 1 at step 7")
    passing = train(Path("runs"), "1:1", 5)
    for name, command in (("bad", bad), ("broken", broken), ("passing", passing)):
        cluster.submit(name, tree, *command)
    jobs = {name: cluster.await_end(name) for name in ("bad", "broken", "passing")}
    codes = {name: details["driver_exit_code"] for name, details in jobs.items()}
    assert codes == {"bad": 2, "broken": 1, "passing": 2}
    assert {details["status"] for details in jobs.values()} == {"FAILED"}
    assert "optimizer.lrr: there is no such setting" in jobs["bad"]["message"]
    assert "w1: RuntimeError: injected fault: w1 raises at step 7" in jobs["broken"]["message"]
    assert "which Ray deletes with the job" in jobs["passing"]["message"]
    assert not (tmp_path / "run").exists()


def test_submission_without_the_token_is_refused(cluster: Head, tree: Path) -> None:
    stranger = {**cluster.environment, "RAY_AUTH_TOKEN": "guessed"}
    ended = Head(cluster.address, cluster.folder, stranger).ray(
        "job", "submit", "--working-dir", str(tree), "--", "true"
    )
    assert ended.returncode != 0
    assert "auth" in (ended.stdout + ended.stderr).lower()


def test_other_sources_on_the_cluster_are_refused_in_one_line(
    tmp_path: Path, cluster: Head
) -> None:
    """The files change after the driver, but before the cluster's processes read them."""
    tree = copy_working_tree(tmp_path / "tree")
    command = [sys.executable, "-m", "pipelines", "train", *arguments("tiny", "dp=2", "2:2", 5)]
    environment = {**cluster.environment, "RAY_ADDRESS": cluster.address, "PYTHONUNBUFFERED": "1"}
    driver = Popen(
        [*command, *storage_options(tmp_path)],
        stdout=PIPE,
        stderr=PIPE,
        text=True,
        env=environment,
        cwd=tree,
    )
    assert driver.stdout is not None and "run run:" in driver.stdout.readline()
    with (tree / "elastic" / "__init__.py").open("a") as file:
        file.write("# Changed.\n")
    _, errors = driver.communicate(timeout=300.0)
    assert driver.returncode == 2, errors
    [line] = errors.splitlines()
    assert "runs other sources than this command" in line
    assert not read_lines(tmp_path / "run" / "journal.jsonl")
    cluster.await_end_of_actors()
