"""A write of a checkpoint shard that never returns, in a real worker: checkpoints continue."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import run_in_processes
from run_checks import assert_no_step_repeated

from actors.controller.shell import Shell
from actors.runtime.fault_spec import Fault
from elastic.protocol.events import Event, StepCommitted, StopRequested, WorkerLost
from pipelines.run.recipes import tiny
from pipelines.settings import CheckpointSettings, DataSettings

PATIENCE_S = 3.0
SETTINGS = tiny().model_copy(
    update={
        "data": DataSettings(source="random", seq_len=16),
        "steps": 100_000,
        "eval_every": 0,
        "checkpoint": CheckpointSettings(every=8),
    }
)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["dp=2", "fsdp=2"])
def test_worker_with_a_hanging_write_is_drained_and_checkpoints_continue(
    tmp_path: Path, layout: str
) -> None:
    """No step is lost, also if the worker is the only holder of its shard of the state."""
    fault = Fault("hang", "w1", 16, "writing")
    shells: list[Shell] = []
    losses: list[Event] = []

    def stop_after_next_checkpoint(event: Event) -> None:
        if isinstance(event, WorkerLost):
            losses.append(event)
        if losses and isinstance(event, StepCommitted) and event.record.step % 8 == 1:
            shells[0].post(StopRequested("a checkpoint was due"))

    run = run_in_processes(
        tmp_path,
        SETTINGS,
        2,
        layout="" if layout == "dp=2" else layout,
        faults=(fault,),
        on_event=stop_after_next_checkpoint,
        on_shell=shells.append,
        save_timeout_s=PATIENCE_S,
    )
    assert run.stopped.outcome == "interrupted", run.story()
    [warning] = [line for line in run.lines_of("Warned") if line["kind"] == "checkpoint"]
    assert "w1 on" in warning["text"] and "checkpoint of step 16" in warning["text"]
    saved = [(line["time"], line["step"]) for line in run.lines_of("Checkpointed")]
    assert next(step for _, step in saved) == 8 and 16 not in [step for _, step in saved]
    next_saved_at = next(time for time, step in saved if step > 16)
    assert next_saved_at - warning["time"] < 20.0, (
        "the next checkpoint follows once the worker is replaced"
    )
    assert [line["worker"] for line in run.lines_of("WorkerLost")] == ["w1"]
    assert not run.lines_of("Abort")
    assert_no_step_repeated(run)
