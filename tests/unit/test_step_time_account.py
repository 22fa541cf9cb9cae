"""The account of step times: shares, speed, the newest minute and the whole run."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from written_runs import WrittenRun

from elastic.protocol.events import WorkerReady
from elastic.protocol.votes import SPLIT, StepRecord
from elastic.protocol.wire import decode, encode
from pipelines.observe.history.history import read_history
from pipelines.observe.history.history_file import load_history
from pipelines.observe.history.step_time import RECENT_S, Device, StepTimeAccount
from pipelines.observe.view.facts import step_parts
from pipelines.observe.view.status_report import RunStatus

READY = WorkerReady("w0", "n", 1, device_name="H100", step_flops=4e12, peak_flops=100e12)


def row(step: int, now: float, compute_s: float, world_size: int = 2, **changes: Any) -> Any:
    split = dict.fromkeys(SPLIT, 0.0) | {"compute_s": compute_s, "vote_s": 0.25 * compute_s}
    numbers = (now, step, 1, world_size, 1.0, 1000, 0.1, 1.0, compute_s)
    return {**asdict(StepRecord(*numbers, skipped=False)), **split, **changes}


def test_shares_and_speed_of_the_whole_run() -> None:
    account = StepTimeAccount()
    account.take_ready({"event": "WorkerReady", **asdict(READY)})
    for step in (1, 2):
        account.take(row(step, 10.0 + step, compute_s=0.8))
    assert account.run.shares()["compute"] == pytest.approx(0.8)
    assert step_parts(account.run) == "compute 80%, vote 20%"
    speed = account.device.speed(account.run)  # 4 s of two workers
    assert speed["tokens_per_s"] == pytest.approx(500.0)
    assert speed["flops_per_token"] == pytest.approx(4e9)
    assert speed["tflops"] == pytest.approx(2.0)
    assert speed["mfu"] == pytest.approx(0.02)


def test_recent_steps_are_those_of_the_last_minute() -> None:
    account = StepTimeAccount()
    for step in range(1, 101):
        account.take(row(step, 10.0 * step, compute_s=1.0 if step < 90 else 3.0))
    assert account.run.num_steps == 100
    assert account.recent.num_steps == RECENT_S // 10 + 1
    assert account.recent.compute_s == pytest.approx(3.0 * account.recent.num_steps)


def test_lines_without_a_split_or_figures_are_of_no_use() -> None:
    account = StepTimeAccount()
    account.take(row(1, 1.0, 1.0, data_s=None))
    account.take_ready({"event": "WorkerReady", "worker": "w0", "node": "n", "pid": 1})
    assert account.run.num_steps == 0 and account.run.shares() == {}
    assert account.device == Device()
    assert set(account.device.speed(account.run).values()) == {None}
    account.take(row(2, 2.0, 1.0, tokens=None))
    assert account.device.speed(account.run)["flops_per_token"] is None


def test_account_survives_the_cache() -> None:
    account = StepTimeAccount()
    account.take_ready({"event": "WorkerReady", **asdict(READY)})
    for step in range(1, 5):
        account.take(row(step, float(step), compute_s=0.8))
    again = decode(StepTimeAccount, encode(account, is_sparse=True))
    assert again == account
    assert again.recent == account.recent


def step_time_without_cache(run: WrittenRun) -> Any:
    followed = load_history(run.folder, needs_all_metrics=False)
    followed.follow()
    return RunStatus("run", "", run.now, followed.history).as_json()["step_time"]["run"]


def test_end_of_the_metrics_is_not_called_the_whole_run(tmp_path: Path) -> None:
    run = WrittenRun(tmp_path / "run")
    run.start(2)
    line = json.dumps({**row(1, run.now, 1.0), "note": "x" * 1000}) + "\n"
    (run.folder.path / "metrics.jsonl").write_text(line * 1200)
    assert step_time_without_cache(run) is None


def test_status_shows_split_and_peak_memory(tmp_path: Path) -> None:
    run = WrittenRun(tmp_path / "run")
    run.start(2)
    run.commit(split=dict.fromkeys(SPLIT, 0.1))
    run.sample("w1")
    history = read_history(run.folder)
    assert history.num_damaged == 0
    status = RunStatus("run", "", run.now, history, owner={"pid": 1}).as_json()
    assert status["step_time"]["run"]["vote_s"] == pytest.approx(0.1)
    assert status["step_time"]["recent"]["tflops"] is None
    assert [worker["peak_bytes"] for worker in status["workers"]] == [None, 3e9]
    assert step_time_without_cache(run) is not None, "the file is short"
    load_history(run.folder).save()
    followed = load_history(run.folder)
    followed.follow()
    assert followed.history.peak_bytes == {"w1": 3e9}
    run.sample("w0")
    followed.follow()
    assert followed.history.peak_bytes == {"w1": 3e9, "w0": 3e9}
