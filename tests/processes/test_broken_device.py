"""A broken device loses its worker once, also if NCCL reports a connection error."""

from __future__ import annotations

from pathlib import Path

import pytest
from broken_device import MARK
from harness import run_in_processes
from run_checks import assert_no_step_repeated

from pipelines.run.recipes import tiny
from pipelines.settings import DataSettings

SETTINGS = tiny().model_copy(
    update={"data": DataSettings(source="random", seq_len=16), "steps": 20, "eval_every": 0}
)


@pytest.mark.parametrize("program", ["raises_first", "raises_late"])
def test_worker_with_a_broken_device_is_lost_once(tmp_path: Path, program: str) -> None:
    """Also if a peer fails first, so that the error of the device comes after the abort."""
    run = run_in_processes(
        tmp_path / "run",
        SETTINGS,
        3,
        layout="dp=3",
        program=f"broken_device:{program}",
        environment={MARK: str(tmp_path / "pid")},
    )
    assert run.stopped.outcome == "completed", run.story()
    assert [line["worker"] for line in run.lines_of("WorkerLost")] == ["w1"], run.story()
    exceptions = [line for line in run.lines_of("WorkerRaised") if line["worker"] == "w1"]
    assert [line["kind"] for line in exceptions] == ["device"]
    assert "w1" not in run.lines_of("Resume")[1]["workers"]
    assert_no_step_repeated(run)
