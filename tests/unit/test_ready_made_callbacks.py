"""TensorBoard's and wandb's own readers see what their callbacks wrote of a run."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from json import loads
from pathlib import Path
from struct import Struct
from typing import Any

import pytest
from written_runs import WrittenRun, append

from elastic.protocol.commands import Stopped
from elastic.protocol.events import Checkpointed, Evaluated, WorkerDraining
from pipelines.callbacks import Callback, TensorBoardCallback, WandbCallback
from pipelines.callbacks.callback_thread import called_back
from pipelines.callbacks.loading import load_callbacks
from pipelines.errors import UserError


def write_run(run: WrittenRun, callback: Callback) -> None:
    """Two sessions of a run with an evaluation, a drain, a rollback and a checkpoint."""
    recipe = {"recipe": "tiny", "settings": {"optimizer": {"lr": 0.001}}}
    with called_back(run.folder, load_callbacks([callback]), recipe) as calls:
        calls.start()
        run.start(2)
        run.commit(9.0)
        row = {"time": run.now, "step": 2, "generation": 1, "world_size": 2, "loss": 8.0}
        append(run.folder.metrics, {**row, "skipped": False, "reported": {"accuracy": 0.5}})
        run.step = 2
        run.append_event(Evaluated(1, 2, 7.5, (("perplexity", None),)))
        run.commit(7.0)
        run.append_event(WorkerDraining("w1", "a drain"))
        run.roll_back(2)
        run.resume("w0")
        run.commit(6.0)
        run.append_event(Checkpointed(3, 2, "saved/3"))
        run.stop("interrupted")
        calls.outcome = Stopped("interrupted", 3)
    assert not calls.failures
    with called_back(run.folder, load_callbacks([callback]), recipe) as calls:
        calls.start()
        run.start(1)
        run.commit(5.0)
        run.commit(None)
        run.stop()
        calls.outcome = Stopped("completed", 5)
    assert not calls.failures


BLOCK_BYTES = 1 << 15
LEVEL_DB_HEADER = Struct("<IHB")
LOSSES = [(1, 9.0), (2, 8.0), (3, 6.0), (4, 5.0)]


@pytest.mark.parametrize("is_named", [False, True])
def test_tensorboard_shows_steps_without_the_undone_ones(tmp_path: Path, is_named: bool) -> None:
    pytest.importorskip("tensorboard")
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    folder = tmp_path / "board"
    run = WrittenRun(tmp_path / "run")
    write_run(run, TensorBoardCallback(folder) if is_named else TensorBoardCallback())
    place = folder / "run" if is_named else tmp_path / "run" / "tensorboard"
    board = accumulators.EventAccumulator(str(place))
    board.Reload()

    def values(name: str) -> list[tuple[int, float]]:
        return [(event.step, event.value) for event in board.Scalars(name)]

    assert values("train/loss") == LOSSES
    assert values("reported/accuracy") == [(2, 0.5)]
    assert values("held_out/loss") == [(2, 7.5)]
    assert values("run/world_size") == [(1, 2), (2, 2), (3, 1), (4, 1), (5, 1)]
    assert {"train/lr", "train/grad_norm", "time/step_s"} <= set(board.Tags()["scalars"])
    assert not any("skipped" in name or "generation" in name for name in board.Tags()["scalars"])
    texts = {
        name: [event.tensor_proto.string_val[0].decode() for event in board.Tensors(name)]
        for name in board.Tags()["tensors"]
    }
    assert texts == {
        "events/checkpoints/text_summary": ["saved/3"],
        "events/notices/text_summary": ["worker draining: w1: a drain"],
        "events/reshards/text_summary": ["generation 2: 1 worker (dp=1)"],
    }


def messages_in(content: bytes) -> Iterator[bytes]:
    """The messages of a file of wandb: a log of LevelDB, in blocks of 32 KiB, whose first block
    begins with `:W&B` and a version."""
    at, message = 7, b""
    while at < len(content):
        left = BLOCK_BYTES - at % BLOCK_BYTES
        if left < LEVEL_DB_HEADER.size:
            at += left
            continue
        _, num_bytes, kind = LEVEL_DB_HEADER.unpack_from(content, at)
        at += LEVEL_DB_HEADER.size
        message += content[at : at + num_bytes]
        at += num_bytes
        if kind in (1, 4):  # whole, or the last part
            yield message
            message = b""


def read_wandb_run(file: Path) -> tuple[dict[str, Any], list[dict[str, Any]], dict[str, Any]]:
    """The run's record, its rows and its summary in a file of wandb."""
    records = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    about: dict[str, Any] = {}
    rows: list[dict[str, Any]] = []
    summary: dict[str, Any] = {}
    for message in messages_in(file.read_bytes()):
        record = records.Record()
        record.ParseFromString(message)
        match record.WhichOneof("record_type"):
            case "run":
                about = {"name": record.run.display_name, "id": record.run.run_id}
                about["project"] = record.run.project
            case "history":
                items = record.history.item
                row = {item.key or ".".join(item.nested_key): item for item in items}
                rows.append({name: loads(item.value_json) for name, item in row.items()})
            case "summary":
                for item in record.summary.update:
                    name = item.key or ".".join(item.nested_key)
                    summary[name] = loads(item.value_json)
    return about, rows, summary


def test_wandb_has_the_steps_over_their_numbers_and_continues_a_resumed_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    run = WrittenRun(tmp_path / "run")
    write_run(run, WandbCallback(project="mine", dir=str(tmp_path)))
    first, second = sorted((tmp_path / "wandb").glob("offline-run-*/*.wandb"), key=os.path.getmtime)
    about, rows, summary = read_wandb_run(first)
    assert (about["name"], about["project"]) == ("run", "mine")
    assert [(row["step"], row["train/loss"]) for row in rows if "train/loss" in row] == [
        (1, 9.0), (2, 8.0), (3, 7.0), (3, 6.0),
    ]  # fmt: skip
    assert [row["held_out/loss"] for row in rows if "held_out/loss" in row] == [7.5]
    assert summary["num_reshards"] == summary["num_notices"] == 1
    assert (summary["checkpoint"], summary["outcome"]) == ("saved/3", "interrupted")
    resumed, later_rows, later_summary = read_wandb_run(second)
    assert resumed["id"] == about["id"] and later_summary["outcome"] == "completed"
    assert [row["step"] for row in later_rows] == [4, 5]


def test_wandb_without_a_login_is_refused_before_a_launch(tmp_path: Path) -> None:
    """In a process of its own: wandb remembers a login."""
    pytest.importorskip("wandb")
    environment = {name: value for name, value in os.environ.items() if "WANDB" not in name}
    program = (
        "from pipelines.callbacks import WandbCallback\n"
        "try: WandbCallback()\n"
        f"except {UserError.__module__}.UserError as error: print(error)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", f"import pipelines.errors\n{program}"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        stdin=subprocess.DEVNULL,
        env={**environment, "HOME": str(tmp_path), "NETRC": str(tmp_path / "netrc")},
    )
    assert ended.stdout.startswith("WandbCallback: No API key configured.")
    assert "WANDB_MODE=offline" in ended.stdout and ended.stdout.count("\n") == 1
