"""`--in-process`: the same training on this thread, resumable by other processes and vice versa."""

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
from harness import read, run_plainly
from mlflow import MlflowClient

from actors.local.in_process import Ended, run_in_process
from actors.storage.lease import owner_of
from actors.worker.step_protocol import Stepper
from elastic.protocol.events import Event, StepCommitted
from pipelines.observe.history.run_folder import default_tracking_uri
from pipelines.run.in_process import train_in_process, without_deadlines
from pipelines.run.plan import TrainRequest, make_plan, settings_of, store_recipe
from pipelines.settings.errors import UserError

FLOAT64 = ("dtype=float64", "data.seq_len=16", "checkpoint.every=4", "batch=6")


def asked(storage: Path, steps: int, **changes: object) -> TrainRequest:
    return TrainRequest(
        "tiny", "run", str(storage), "1", None, steps, None, "random", FLOAT64, **changes
    )


def here(asked: TrainRequest, hear=lambda event, post: None) -> Ended:
    """Train on the test's thread, without the tracker."""
    plan = make_plan(asked, num_gpus=0)
    store_recipe(plan)
    return run_in_process(without_deadlines(plan.run), hear)


def losses_in(folder: Path) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in read(folder / "metrics.jsonl")}


def test_what_the_program_raises_comes_out_as_it_was_raised(tmp_path: Path) -> None:
    """The exception is raised on the caller's thread with its frames, after the run was saved."""
    threads, began, hook = set(), set(threading.enumerate()), sys.excepthook

    def hear(event: Event, post) -> None:
        threads.add(threading.current_thread())

    ended = here(asked(tmp_path, 9, inject=("raise in worker 0 at step 7",)), hear)
    assert threads == {threading.current_thread()}
    assert (ended.outcome.outcome, ended.outcome.step) == ("failed", 6)
    frames = [frame for frame, _ in traceback.walk_tb(ended.error.__traceback__)]
    [stepper] = {id(f.f_locals["self"]): f.f_locals["self"] for f in frames if _is_step(f)}.values()
    assert stepper.committed_step == 6, "a debugger finds the frames as they were"
    assert (tmp_path / "run" / "checkpoints").is_dir()
    wanted, _ = expected(settings_of(asked(tmp_path, 9))[0], 6)
    assert list(losses_in(tmp_path / "run").values()) == pytest.approx(
        [loss for loss, _ in wanted], rel=1e-9
    )
    assert not torch.distributed.is_initialized() and sys.excepthook is hook
    left = {thread.name for thread in set(threading.enumerate()) - began if thread.is_alive()}
    assert not left & {"controller", "training", "watch", "publisher"}


def _is_step(frame) -> bool:
    return frame.f_code.co_qualname == "Stepper.step"


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"workers": "1:4"}, "--workers 1:4"),
        ({"layout": "dp=2"}, "--layout dp=2"),
        ({"detach": True}, "--detach"),
        ({"inject": ("remove worker 0 at step 4",)}, "removed"),
    ],
)
def test_what_needs_others_is_refused(tmp_path: Path, changes, told: str) -> None:
    with pytest.raises(UserError, match=told) as refused:
        train_in_process(TrainRequest("tiny", "x", str(tmp_path), data="random", **changes), None)
    assert "\n" not in str(refused.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_resumed_by_others_and_resuming_theirs(tmp_path: Path) -> None:
    """In process, then with two processes, then in process with a pause beyond any deadline."""
    folder, environment = tmp_path / "run", dict(os.environ)
    assert here(asked(tmp_path, 8)).outcome.outcome == "completed"
    assert os.environ == environment, "who is started from here later inherits nothing of it"
    assert owner_of(make_plan(asked(tmp_path, 8), 0).folder.files) is None
    settings = settings_of(asked(tmp_path, 16))[0]
    assert run_plainly(folder, settings, 2).stopped.outcome == "completed"

    def stand_still(event: Event, post) -> None:
        if isinstance(event, StepCommitted) and event.record.step == 20:
            time.sleep(4.0)

    assert here(asked(tmp_path, 24), stand_still).outcome.outcome == "completed"
    wanted, _ = expected(settings_of(asked(tmp_path, 24))[0], 24)
    lines = read(folder / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(1, 25)), "nothing is redone"
    assert [line["loss"] for line in lines] == pytest.approx([loss for loss, _ in wanted], rel=1e-9)
    told = [line.get("event") for line in read(folder / "journal.jsonl")]
    assert "WorkerSuspected" not in told and "WorkerLost" not in told


@pytest.mark.slow
def test_the_command_is_stopped_and_goes_on(tmp_path: Path) -> None:
    """By SIGINT, and under pdb paused in a step; MLflow gets everything at the end."""
    command = [sys.executable, "-m", "pipelines", "train", "tiny", "--in-process", "--data"]
    command += ["random", "--storage", str(tmp_path), "--run-name", "run", "--steps"]
    profile = ["--profile", "steps=2:3"]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    running = subprocess.Popen([*command, "5000", *profile], env=environment)
    metrics = tmp_path / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (metrics.exists() and len(read(metrics)) >= 3) and time.monotonic() < deadline:
        time.sleep(0.1)
    running.send_signal(signal.SIGINT)
    assert running.wait(120) == 130
    stopped = len(read(metrics))
    lines, first = inspect.getsourcelines(Stepper.step)
    stop = f"b {inspect.getsourcefile(Stepper)}:{first + len(lines) - 1}"
    pdb = [sys.executable, "-m", "pdb", "-c", stop, "-c", "c", *command[1:], str(stopped + 5)]
    ended = subprocess.run(
        pdb,
        input="p 'stands at', record.step\ncl 1\nc\nq\n",
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert f"('stands at', {stopped + 1})" in ended.stdout, ended.stdout + ended.stderr
    assert sorted(losses_in(tmp_path / "run")) == list(range(1, stopped + 6))
    client = MlflowClient(default_tracking_uri(tmp_path))
    tracking = json.loads((tmp_path / "run" / "tracking.json").read_text())
    names = [file.path for file in client.list_artifacts(tracking["run_id"], "profiles")]
    assert names == ["profiles/w0-g1-steps-2-3.json.gz"]
