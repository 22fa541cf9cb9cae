"""The order of callbacks' calls by the files of a run, and what may go wrong with either."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from written_runs import WrittenRun, append

from elastic.protocol.commands import Stopped
from elastic.protocol.events import (
    Checkpointed,
    Evaluated,
    NodeDraining,
    WorkerDraining,
)
from elastic.protocol.notes import Resharded
from pipelines.callbacks import Callback
from pipelines.callbacks.callback_thread import CallbackThread, called_back
from pipelines.callbacks.loading import load_callbacks
from pipelines.callbacks.run_calls import RunCalls
from pipelines.errors import UserError


def following(run: WrittenRun) -> RunCalls:
    return RunCalls(run.folder, {"recipe": "tiny", "settings": {"seed": 7}})


def shown(calls: RunCalls, is_last: bool = False) -> list[str]:
    """The calls that are due, in words."""
    return [show(call.method, call.record) for call in calls.read(is_last)]


def show(method: str, record: Any) -> str:
    method = method.removeprefix("on_")
    if method == "notice":
        return f"notice {' '.join(record.workers)}"
    return f"{method} {record.number if method == 'step' else record.step}"


@pytest.fixture
def run(tmp_path: Path) -> WrittenRun:
    return WrittenRun(tmp_path / "run")


def test_steps_and_events_come_in_the_order_of_the_run(run: WrittenRun) -> None:
    calls = following(run)
    assert shown(calls) == []
    run.start(2, steps=50)
    assert not shown(following(run)), "it has started before"
    for _ in range(4):
        run.commit()
    run.append_event(Evaluated(1, 4, 1.5, (("accuracy", 0.5),)))
    run.append_event(Checkpointed(4, 1, "runs/x"))
    run.commit()
    run.append_event(NodeDraining("node-0", run.now + 60, "spot"))
    run.commit()
    run.append_command(Resharded(2, 6, "live", 100, 200, 0.25))
    run.resume("w0")
    run.commit()
    run.stop()
    expected = "start 0, step 1, step 2, step 3, step 4, evaluation 4, checkpoint 4, step 5, "
    expected += "notice w0 w1, step 6, reshard 6, step 7"
    assert ", ".join(shown(calls)) == expected
    assert shown(calls, is_last=True) == []


def test_records_have_what_the_files_have(run: WrittenRun) -> None:
    run.append_event(WorkerDraining("w9", "before the run"))
    began, calls = run.now, following(run)
    run.now += 100
    run.start(2, steps=50)
    run.commit(2.5)
    row = {"time": run.now, "step": 2, "generation": 1, "world_size": 2, "loss": None}
    append(run.folder.metrics, {**row, "reported": {"accuracy": 0.5}})
    run.append_event(Evaluated(1, 2, None, (("accuracy", 0.5),), ("loss",)))
    run.append_event(WorkerDraining("w1", "a drain"))
    run.append_command(Resharded(2, 2, "live", 100, 200, 0.25))
    run.resume("w0")
    start, first, second, evaluation, notice, reshard = [call.record for call in calls.read()]
    assert (start.name, start.folder) == ("run", run.folder.url)
    assert (start.began, start.num_steps, start.layout) == (began, 50, "dp=2")
    assert (start.workers, start.recipe, start.settings) == (("w0", "w1"), "tiny", {"seed": 7})
    assert (first.loss, first.metrics["lr"], first.world_size) == (2.5, 0.001, 2)
    assert (second.loss, second.reported) == (None, {"accuracy": 0.5})
    assert second.metrics == {**row, "accuracy": 0.5}
    assert (evaluation.loss, evaluation.metrics) == (None, {"accuracy": 0.5})
    assert (notice.kind, notice.workers) == ("worker draining", ("w1",))
    assert (notice.node, notice.deadline, notice.cause) == ("node-0", None, "a drain")
    assert (reshard.source, reshard.bytes_moved, reshard.seconds) == ("live", 100, 0.25)
    assert (reshard.workers, reshard.layout, reshard.rolled_back_from) == (("w0",), "dp=1", None)


def test_undone_steps_come_again_behind_the_reshard(run: WrittenRun) -> None:
    calls = following(run)
    run.start(2)
    for _ in range(5):
        run.commit()
    run.roll_back(3)
    run.resume("w0")
    run.commit()
    run.commit()
    *_, reshard, fourth, fifth = [call.record for call in calls.read()]
    assert (reshard.step, reshard.rolled_back_from) == (3, 5)
    assert (fourth.number, fifth.number, fifth.generation) == (4, 5, 2)


def test_rollback_before_the_first_step_belongs_to_no_later_reshard(run: WrittenRun) -> None:
    calls = following(run)
    run.step = 9
    run.roll_back(3)
    run.start(2)
    run.commit()
    run.resume("w0")
    start, _, reshard = [call.record for call in calls.read()]
    assert (start.step, reshard.step, reshard.rolled_back_from) == (3, 4, None)


def test_lines_that_a_restarted_controller_repeats_are_called_once(run: WrittenRun) -> None:
    """Late lines of a dead controller have an older generation; workers report events again."""
    calls = following(run)
    run.start(2)
    run.commit()
    first = json.loads((run.folder.path / "metrics.jsonl").read_text())
    for event in 2 * [Evaluated(1, 1, 1.5), WorkerDraining("w1", "a"), Checkpointed(1, 1, "x")]:
        run.append_event(event)
    append(run.folder.metrics, first)
    run.resume("w0")
    run.commit()
    append(run.folder.metrics, {**first, "step": 2})
    append(run.folder.metrics, {"step": "?"})
    append(run.folder.journal, {"event": "Evaluated", "time": run.now})
    run.commit()
    names = "start 0, step 1, evaluation 1, notice w1, checkpoint 1, reshard 1, step 2, step 3"
    assert ", ".join(shown(calls)) == names


def test_events_wait_for_metrics_that_storage_has_later(run: WrittenRun) -> None:
    """On an object store the two files are written independently of each other."""
    calls, path = following(run), run.folder.path
    run.start(2)
    for _ in range(3):
        run.commit()
    run.append_event(Checkpointed(3, 1, "x"))
    run.roll_back(2)
    run.resume("w0")
    rows = (path / "metrics.jsonl").read_text().splitlines(keepends=True)
    (path / "metrics.jsonl").write_text(rows[0])
    assert shown(calls) == ["start 0", "step 1"]
    with open(path / "metrics.jsonl", "a") as metrics:
        metrics.write("".join(rows[1:]))
    assert shown(calls) == ["step 2", "step 3", "checkpoint 3", "reshard 2"]


def test_resumed_run_has_only_new_steps(run: WrittenRun) -> None:
    run.start(2)
    for _ in range(5):
        run.commit()
    run.append_event(Checkpointed(5, 1, "x"))
    run.stop("interrupted")
    calls = following(run)
    run.step = 4  # the state is that of the newest checkpoint
    run.start(2)
    run.commit()
    run.commit()
    assert shown(calls) == ["start 4", "step 5", "step 6"]


def test_run_that_has_nothing_to_do_starts_and_ends(run: WrittenRun) -> None:
    run.start(2)
    run.commit()
    run.stop()
    calls = following(run)
    assert shown(calls, is_last=True) == [], "no controller has taken the run"
    run.start(0)
    journal = run.folder.path / "journal.jsonl"
    lines = journal.read_text().splitlines(keepends=True)
    assert json.loads(lines[-1])["command"] == "Resume"
    journal.write_text("".join(lines[:-1]))
    run.stop()
    assert shown(calls) == []
    assert shown(calls, is_last=True) == ["start 1"]


class Recorder(Callback):
    """Writes all calls down."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []

    def on_start(self, run) -> None:
        self.calls.append(("on_start", run))

    def on_step(self, step) -> None:
        self.calls.append(("on_step", step))

    def on_end(self, result) -> None:
        self.calls.append(("on_end", result))

    @property
    def shown(self) -> list[str]:
        return [show(*call) for call in self.calls]


class Blocked(Recorder):
    """Does not return from its first step until the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.has_begun, self.may_return = threading.Event(), threading.Event()

    def on_step(self, step) -> None:
        super().on_step(step)
        self.has_begun.set()
        assert self.may_return.wait(60)


@pytest.fixture
def blocked() -> Iterator[Blocked]:
    blocked = Blocked()
    yield blocked
    blocked.may_return.set()


def commit_three(run: WrittenRun) -> None:
    run.start(2)
    for _ in range(3):
        run.commit()


def test_end_waits_for_the_calls_of_a_slow_callback(run: WrittenRun, blocked: Blocked) -> None:
    with called_back(run.folder, load_callbacks([blocked]), {}) as calls:
        calls.start()
        commit_three(run)
        assert blocked.has_begun.wait(60)
        run.stop()
        calls.outcome = Stopped("completed", 3)
        blocked.may_return.set()
    assert blocked.shown == ["start 0", "step 1", "step 2", "step 3", "end 3"]
    assert not calls.failures


def test_end_does_not_wait_for_a_call_that_never_returns(
    run: WrittenRun, blocked: Blocked, capsys
) -> None:
    calls = CallbackThread(run.folder, load_callbacks([blocked]), call_patience_s=0.2)
    calls.start()
    commit_three(run)
    assert blocked.has_begun.wait(60)
    calls.finish(Stopped("completed", 3))
    assert calls.failures == [
        "callback Blocked.on_step does not return: the remaining calls are dropped"
    ]
    assert f"elastic: {calls.failures[0]}\n" in capsys.readouterr().err
    assert blocked.shown == ["start 0", "step 1"]


def test_interruption_waits_for_no_call(run: WrittenRun, blocked: Blocked) -> None:
    with (
        pytest.raises(KeyboardInterrupt),
        called_back(run.folder, load_callbacks([blocked]), {}) as calls,
    ):
        calls.start()
        commit_three(run)
        assert blocked.has_begun.wait(60)
        raise KeyboardInterrupt
    assert blocked.shown == ["start 0", "step 1"]


def test_lost_controller_ends_the_calls_with_its_error(run: WrittenRun) -> None:
    recorder = Recorder()
    with (
        pytest.raises(OSError, match="gone"),
        called_back(run.folder, load_callbacks([recorder]), {}) as calls,
    ):
        calls.start()
        commit_three(run)
        raise OSError("it is gone")
    method, end = recorder.calls[-1]
    assert (method, end.outcome, end.step) == ("on_end", "failed", 3)
    assert end.reason == "OSError: it is gone" and end.metrics["step"] == 3


def test_run_that_never_starts_calls_nothing(run: WrittenRun) -> None:
    recorder = Recorder()
    with (
        pytest.raises(UserError),
        called_back(run.folder, load_callbacks([recorder]), {}),
    ):
        raise UserError("refused")
    assert not recorder.calls


def test_traceback_is_printed_if_it_cannot_be_written(run: WrittenRun, capsys) -> None:
    class Raising(Recorder):
        def on_start(self, run_) -> None:
            shutil.rmtree(run.folder.path / "logs", ignore_errors=True)
            (run.folder.path / "logs").write_text("no folder")
            raise ValueError("mine")

    raising, recorder = Raising(), Recorder()
    with called_back(run.folder, load_callbacks([raising, recorder]), {}) as calls:
        calls.start()
        commit_three(run)
        calls.outcome = Stopped("completed", 3)
    [failure] = calls.failures
    assert failure.endswith("raised ValueError: mine at step 0 and is not called any more; "
                            "traceback: above")  # fmt: skip
    assert 'raise ValueError("mine")' in capsys.readouterr().err
    assert recorder.shown[-1] == "end 3" and not raising.calls
    assert asdict(recorder.calls[-1][1])["failed_callbacks"] == (failure,)
