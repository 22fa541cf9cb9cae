"""`--in-process`: the same training on this thread; it resumes other runs, and they resume it."""

from __future__ import annotations

import inspect
import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path

import pytest
import torch
from expected import expected
from harness import read_lines, run_in_processes
from mlflow import MlflowClient

from actors.local.in_process import InProcessOutcome, run_in_process
from actors.storage.lease import owner_of
from actors.worker.step_protocol import Stepper
from elastic.protocol.events import Event, StepCommitted
from pipelines.errors import UserError
from pipelines.observe.history.run_folder import default_tracking_uri
from pipelines.run.in_process import train_in_process, without_deadlines
from pipelines.run.plan import TrainRequest, make_plan, settings_of, store_recipe

FLOAT64 = ("dtype=float64", "data.seq_len=16", "checkpoint.every=4", "batch=6")


def request_for(storage: Path, steps: int, **changes: object) -> TrainRequest:
    return TrainRequest(
        "tiny", "run", str(storage), "1", None, steps, None, "random", FLOAT64, **changes
    )


def train_here(request: TrainRequest, on_event=lambda event, post: None) -> InProcessOutcome:
    """Train on the thread of the test, without MLflow."""
    plan = make_plan(request, num_gpus=0)
    store_recipe(plan)
    return run_in_process(without_deadlines(plan.run), on_event)


def losses_in(folder: Path) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in read_lines(folder / "metrics.jsonl")}


def test_exception_of_the_program_reaches_the_caller_with_its_frames(tmp_path: Path) -> None:
    """The exception is raised on the caller's thread with its frames, after the run was saved."""
    threads, threads_before, hook = set(), set(threading.enumerate()), sys.excepthook

    def on_event(event: Event, post) -> None:
        threads.add(threading.current_thread())

    ended = train_here(request_for(tmp_path, 9, inject=("raise in worker 0 at step 7",)), on_event)
    assert threads == {threading.current_thread()}
    assert (ended.outcome.outcome, ended.outcome.step) == ("failed", 6)
    frames = [frame for frame, _ in traceback.walk_tb(ended.error.__traceback__)]
    [stepper] = {id(f.f_locals["self"]): f.f_locals["self"] for f in frames if _is_step(f)}.values()
    assert stepper.committed_step == 6, "a debugger sees the frames of the error"
    assert (tmp_path / "run" / "checkpoints").is_dir()
    losses_and_norms, _ = expected(settings_of(request_for(tmp_path, 9))[0], 6)
    assert list(losses_in(tmp_path / "run").values()) == pytest.approx(
        [loss for loss, _ in losses_and_norms], rel=1e-9
    )
    assert not torch.distributed.is_initialized() and sys.excepthook is hook
    remaining = {
        thread.name for thread in set(threading.enumerate()) - threads_before if thread.is_alive()
    }
    assert not remaining & {"controller", "training", "watch", "publisher"}


def _is_step(frame) -> bool:
    return frame.f_code.co_qualname == "Stepper.step"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"workers": "1:4"}, "--workers 1:4"),
        ({"layout": "dp=2"}, "--layout dp=2"),
        ({"detach": True}, "--detach"),
        ({"inject": ("remove worker 0 at step 4",)}, "removed"),
    ],
)
def test_options_that_need_other_workers_are_refused(tmp_path: Path, changes, message: str) -> None:
    with pytest.raises(UserError, match=message) as refused:
        train_in_process(TrainRequest("tiny", "x", str(tmp_path), data="random", **changes), None)
    assert "\n" not in str(refused.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_in_process_and_distributed_runs_resume_each_other(tmp_path: Path) -> None:
    """In process, then with two processes, then in process with a pause beyond any deadline."""
    folder, environment = tmp_path / "run", dict(os.environ)
    assert train_here(request_for(tmp_path, 8)).outcome.outcome == "completed"
    assert os.environ == environment, "a later child process inherits no variable"
    assert owner_of(make_plan(request_for(tmp_path, 8), 0).folder.files) is None
    settings = settings_of(request_for(tmp_path, 16))[0]
    assert run_in_processes(folder, settings, 2).stopped.outcome == "completed"

    def pause(event: Event, post) -> None:
        if isinstance(event, StepCommitted) and event.record.step == 20:
            time.sleep(4.0)

    assert train_here(request_for(tmp_path, 24), pause).outcome.outcome == "completed"
    losses_and_norms, _ = expected(settings_of(request_for(tmp_path, 24))[0], 24)
    lines = read_lines(folder / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(1, 25)), "no step is repeated"
    assert [line["loss"] for line in lines] == pytest.approx(
        [loss for loss, _ in losses_and_norms], rel=1e-9
    )
    events = [line.get("event") for line in read_lines(folder / "journal.jsonl")]
    assert "WorkerSuspected" not in events and "WorkerLost" not in events


@pytest.mark.soak
def test_interrupted_command_resumes_under_a_debugger(tmp_path: Path) -> None:
    """SIGINT stops it; resumed under pdb, it pauses in a step. At the end MLflow has everything."""
    command = [sys.executable, "-m", "pipelines", "train", "tiny", "--in-process", "--data"]
    command += ["random", "--storage", str(tmp_path), "--run-name", "run", "--steps"]
    profile = ["--profile", "steps=2:3"]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    running = subprocess.Popen([*command, "5000", *profile], env=environment)
    metrics = tmp_path / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (metrics.exists() and len(read_lines(metrics)) >= 3) and time.monotonic() < deadline:
        time.sleep(0.1)
    running.send_signal(signal.SIGINT)
    assert running.wait(120) == 130
    num_steps = len(read_lines(metrics))
    lines, first = inspect.getsourcelines(Stepper.step)
    breakpoint_command = f"b {inspect.getsourcefile(Stepper)}:{first + len(lines) - 1}"
    pdb = [
        sys.executable,
        "-m",
        "pdb",
        "-c",
        breakpoint_command,
        "-c",
        "c",
        *command[1:],
        str(num_steps + 5),
    ]
    ended = subprocess.run(
        pdb,
        input="p 'paused at', record.step\ncl 1\nc\nq\n",
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert f"('paused at', {num_steps + 1})" in ended.stdout, ended.stdout + ended.stderr
    assert sorted(losses_in(tmp_path / "run")) == list(range(1, num_steps + 6))
    client = MlflowClient(default_tracking_uri(tmp_path))
    tracking = json.loads((tmp_path / "run" / "tracking.json").read_text())
    names = [file.path for file in client.list_artifacts(tracking["run_id"], "profiles")]
    assert names == ["profiles/w0-g1-steps-2-3.json.gz"]
