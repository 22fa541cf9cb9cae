"""Callbacks of real runs: each step once through kills, drains, rollbacks and resumes."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from harness import Outcome, run_in_processes
from rich.console import Console
from s3 import CREDENTIALS, S3Proxy

from actors.runtime.fault_spec import Fault
from elastic.protocol.events import Event, PartFailed, StepCommitted, WorkerDraining
from pipelines.callbacks import Callback
from pipelines.callbacks.callback_thread import CallbackThread, called_back
from pipelines.callbacks.loading import load_callbacks
from pipelines.observe.history.run_folder import RunFolder
from pipelines.run.in_process import train_in_process
from pipelines.run.plan import TrainRequest
from pipelines.run.recipes import tiny
from pipelines.settings import CheckpointSettings, DataSettings

pytestmark = pytest.mark.slow

NUM_STEPS = 40
SETTINGS = tiny().model_copy(
    update={
        "data": DataSettings(source="random", seq_len=16),
        "steps": NUM_STEPS,
        "eval_every": 10,
        "eval_samples": 4,
        "checkpoint": CheckpointSettings(every=10),
    }
)


class EverythingSeen(Callback):
    """Writes down all calls, and their threads."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.threads: set[int | None] = set()

    def _see(self, method: str, record: Any) -> None:
        self.calls.append((method, record))
        self.threads.add(threading.get_ident())

    def on_start(self, run) -> None:
        self._see("start", run)

    def on_step(self, step) -> None:
        self._see("step", step)

    def on_evaluation(self, evaluation) -> None:
        self._see("evaluation", evaluation)

    def on_reshard(self, reshard) -> None:
        self._see("reshard", reshard)

    def on_notice(self, notice) -> None:
        self._see("notice", notice)

    def on_checkpoint(self, checkpoint) -> None:
        self._see("checkpoint", checkpoint)

    def on_end(self, result) -> None:
        self._see("end", result)

    def of(self, method: str) -> list[Any]:
        return [record for name, record in self.calls if name == method]

    @property
    def steps(self) -> list[int]:
        return [step.number for step in self.of("step")]


class FailsAtStep3(EverythingSeen):
    def on_step(self, step) -> None:
        super().on_step(step)
        if step.number == 3:
            raise ZeroDivisionError("by none")


def run_called_back(
    folder: Path, callbacks: Sequence[Callback], settings, workers: int, **options: Any
) -> tuple[Outcome, CallbackThread]:
    """A run in processes, whose callbacks this process calls."""
    run_folder = RunFolder.of(folder.parent, folder.name)
    with called_back(run_folder, load_callbacks(callbacks), {}) as calls:
        calls.start()
        run = run_in_processes(folder, settings, workers, **options)
        calls.outcome = run.stopped
    assert "callbacks" not in {thread.name for thread in threading.enumerate()}
    return run, calls


def test_each_step_and_event_is_called_once_through_a_kill_and_a_drain(tmp_path: Path) -> None:
    seen = EverythingSeen()
    run, calls = run_called_back(
        tmp_path / "run",
        [seen],
        SETTINGS,
        3,
        faults=(Fault("kill", "w2", 15, "vote"),),
        due=((25, WorkerDraining("w1", "a notice")),),
    )
    assert run.stopped.outcome == "completed" and not calls.failures
    assert seen.steps == list(range(1, NUM_STEPS + 1))
    assert [step.loss for step in seen.of("step")] == list(run.losses().values())
    assert [step.metrics for step in seen.of("step")] == run.metrics
    [start], [end] = seen.of("start"), seen.of("end")
    assert (start.step, start.num_steps, start.workers) == (0, NUM_STEPS, ("w0", "w1", "w2"))
    assert (end.outcome, end.step, end.metrics) == ("completed", NUM_STEPS, run.metrics[-1])
    assert (seen.calls[0][0], seen.calls[-1][0]) == ("start", "end")
    _, *generations = run.lines_of("Resume")
    assert [(r.generation, r.step, list(r.workers)) for r in seen.of("reshard")] == [
        (line["generation"], line["step"], line["workers"]) for line in generations
    ]
    assert len(generations) >= 2 and "w2" not in seen.of("reshard")[0].workers
    [notice] = seen.of("notice")
    assert (notice.kind, notice.workers, notice.cause) == ("worker draining", ("w1",), "a notice")
    saved = [(c.step, c.generation, c.path) for c in seen.of("checkpoint")]
    lines = run.lines_of("Checkpointed")
    assert saved == [(line["step"], line["generation"], line["path"]) for line in lines]
    assert {10, 20, 30, NUM_STEPS} <= {step for step, _, _ in saved}
    assert all((Path(path) / "manifest.json").exists() for step, _, path in saved[-1:])
    held_out = [(e.step, e.loss) for e in seen.of("evaluation")]
    assert held_out == [(line["step"], line["loss"]) for line in run.lines_of("Evaluated")]
    assert_events_follow_their_steps(seen)
    assert len(seen.threads) == 1 and threading.get_ident() not in seen.threads


def assert_events_follow_their_steps(seen: EverythingSeen) -> None:
    newest = 0
    for method, record in seen.calls:
        if method == "step":
            newest = record.number
        elif method == "reshard":
            assert record.step == newest
        elif method in ("evaluation", "checkpoint"):
            assert record.step <= newest


def test_steps_that_a_rollback_undoes_come_again(tmp_path: Path) -> None:
    """The only holder of a shard dies: the run continues from the newest checkpoint."""
    seen = EverythingSeen()
    fault = Fault("kill", "w1", 28, "compute")
    run, _ = run_called_back(
        tmp_path / "run", [seen], SETTINGS, 2, layout="fsdp=2", faults=(fault,)
    )
    [rolled_back] = run.lines_of("RolledBack")
    [reshard] = [r for r in seen.of("reshard") if r.rolled_back_from is not None]
    step = rolled_back["step"]
    assert (reshard.step, reshard.rolled_back_from, reshard.source) == (step, 27, "checkpoint")
    assert seen.steps == [*range(1, 28), *range(step + 1, NUM_STEPS + 1)]
    at = seen.calls.index(("reshard", reshard))
    assert [record.number for name, record in seen.calls[:at] if name == "step"][-1] == 27


def test_callback_that_raises_is_not_called_again_and_the_run_continues(
    tmp_path: Path, capsys
) -> None:
    failing, seen = FailsAtStep3(), EverythingSeen()
    run, calls = run_called_back(tmp_path / "run", [failing, seen], SETTINGS, 2)
    assert run.stopped.outcome == "completed"
    assert failing.steps == [1, 2, 3] and not failing.of("end")
    assert seen.steps == list(range(1, NUM_STEPS + 1))
    file = tmp_path / "run" / "logs" / "callback-FailsAtStep3.err"
    line = "callback FailsAtStep3.on_step raised ZeroDivisionError: by none at step 3 and is not "
    assert calls.failures == [f"{line}called any more; traceback: {file}"]
    assert capsys.readouterr().err.count(line) == 1
    assert 'raise ZeroDivisionError("by none")' in file.read_text()
    assert seen.of("end")[0].failed_callbacks == tuple(calls.failures)


def test_resumed_run_calls_only_its_new_steps(tmp_path: Path) -> None:
    first, second = EverythingSeen(), EverythingSeen()
    begun = SETTINGS.model_copy(update={"steps": 15})
    run_called_back(tmp_path / "run", [first], begun, 2)
    run, _ = run_called_back(tmp_path / "run", [second], SETTINGS, 1)
    assert first.steps == list(range(1, 16)) and second.steps == list(range(16, NUM_STEPS + 1))
    [start] = second.of("start")
    assert (start.step, start.began) == (15, first.of("start")[0].began)
    assert not second.of("reshard") and first.of("end")[0].step == 15
    # A checkpoint that is due while another is being written is skipped.
    saved = [line["step"] for line in run.lines_of("Checkpointed") if line["step"] > 15]
    assert [c.step for c in second.of("checkpoint")] == saved and saved[-1] == NUM_STEPS


def test_object_store_that_is_down_for_a_while_loses_no_call(s3_proxy: S3Proxy) -> None:
    """Training continues without storage; the steps come once it answers again."""
    seen = EverythingSeen()

    def watch(event: Event) -> None:
        if isinstance(event, StepCommitted) and event.record.step == 15:
            s3_proxy.close()
        elif isinstance(event, PartFailed):
            s3_proxy.open()

    folder = RunFolder.of(s3_proxy.url, "run")
    with called_back(folder, load_callbacks([seen]), {}) as calls:
        calls.start()
        run = run_in_processes(
            folder.url, SETTINGS, 2, on_event=watch, environment=CREDENTIALS, save_backoff_s=0.1
        )
        calls.outcome = run.stopped
    assert run.stopped.outcome == "completed", run.stopped
    assert not calls.failures and seen.steps == list(range(1, NUM_STEPS + 1))
    assert_events_follow_their_steps(seen)
    lines = run.lines_of("Checkpointed")
    assert [c.step for c in seen.of("checkpoint")] == [line["step"] for line in lines]
    assert seen.of("end")[0].step == NUM_STEPS


class HeldUp(EverythingSeen):
    """Does not return from its first step before the run has ended."""

    def __init__(self) -> None:
        super().__init__()
        self.has_ended = threading.Event()

    def on_step(self, step) -> None:
        super().on_step(step)
        assert self.has_ended.wait(120)


def test_run_does_not_wait_for_a_callback(tmp_path: Path) -> None:
    held_up = HeldUp()
    folder = RunFolder.of(tmp_path, "run")
    with called_back(folder, load_callbacks([held_up]), {}) as calls:
        calls.start()
        run = run_in_processes(tmp_path / "run", SETTINGS, 2)
        assert run.stopped.outcome == "completed" and held_up.steps in ([], [1])
        held_up.has_ended.set()
        calls.outcome = run.stopped
    assert held_up.steps == list(range(1, NUM_STEPS + 1))
    assert held_up.of("end")[0].step == NUM_STEPS


def test_command_calls_them_with_what_a_script_reports(tmp_path: Path, capsys) -> None:
    """The whole command, in one process; it repeats the failures at its end."""
    failing, seen = FailsAtStep3(), EverythingSeen()
    loop = Path(__file__).with_name("script_habits.py")
    request = TrainRequest(
        f"{loop}:reports", "run", str(tmp_path), steps=5, callbacks=(failing, seen)
    )
    code = train_in_process(request, Console())
    output = capsys.readouterr()
    assert code == 0 and seen.steps == [1, 2, 3, 4, 5]
    assert [step.reported["number"] for step in seen.of("step")] == [1, 2, 3, 4, 5]
    assert {"accuracy", "share"} <= set(seen.of("step")[0].metrics)
    assert output.err.count("callback FailsAtStep3.on_step raised ZeroDivisionError") == 2
    assert seen.of("start")[0].settings["steps"] == 5


def test_end_of_a_run_that_fails_has_its_reason(tmp_path: Path) -> None:
    seen = EverythingSeen()
    fault = ("raise in worker 0 at step 4",)
    request = TrainRequest(
        "tiny", "run", str(tmp_path), steps=9, data="random", inject=fault, callbacks=(seen,)
    )
    with pytest.raises(RuntimeError, match="injected"):
        train_in_process(request, Console())
    [end] = seen.of("end")
    assert (end.outcome, end.step, seen.steps) == ("failed", 3, [1, 2, 3])
    assert "injected" in end.reason and "Traceback" in end.traceback
