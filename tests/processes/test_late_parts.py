"""A write of a checkpoint part that never returns, in a real worker: checkpoints go on."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import run_plainly
from run_checks import assert_nothing_redone

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
def test_a_worker_whose_write_hangs_leaves_and_checkpoints_go_on(
    tmp_path: Path, layout: str
) -> None:
    """Without a lost step, also where it alone has its part of the state."""
    fault = Fault("hang", "w1", 16, "writing")
    shells: list[Shell] = []
    lost: list[Event] = []

    def end_after_the_next(event: Event) -> None:
        if isinstance(event, WorkerLost):
            lost.append(event)
        if lost and isinstance(event, StepCommitted) and event.record.step % 8 == 1:
            shells[0].post(StopRequested("a checkpoint was due"))

    run = run_plainly(
        tmp_path,
        SETTINGS,
        2,
        layout="" if layout == "dp=2" else layout,
        faults=(fault,),
        hear=end_after_the_next,
        with_shell=shells.append,
        save_timeout_s=PATIENCE_S,
    )
    assert run.stopped.outcome == "interrupted", run.story()
    [warned] = [line for line in run.told("Warned") if line["kind"] == "checkpoint"]
    assert "w1 on" in warned["text"] and "checkpoint of step 16" in warned["text"]
    saved = [(line["time"], line["step"]) for line in run.told("Checkpointed")]
    assert next(step for _, step in saved) == 8 and 16 not in [step for _, step in saved]
    next_saved_at = next(time for time, step in saved if step > 16)
    assert next_saved_at - warned["time"] < 20.0, "as soon as another has taken its place"
    assert [line["worker"] for line in run.told("WorkerLost")] == ["w1"]
    assert not run.told("Abort")
    assert_nothing_redone(run)
