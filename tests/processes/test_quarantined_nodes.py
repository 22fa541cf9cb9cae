"""A node where workers crash repeatedly is quarantined: no worker starts there."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import run_in_processes
from run_checks import assert_no_step_repeated, assert_survivors_kept

from actors.runtime.fault_spec import Fault
from pipelines.run.recipes import tiny
from pipelines.settings import DataSettings

SETTINGS = tiny().model_copy(
    update={"data": DataSettings(source="random", seq_len=16), "dtype": "float64"}
)
BAD_NODE = "b"


def all_but_two_on_b(worker: str) -> str:
    return "a" if worker in ("w0", "w1") else BAD_NODE


@pytest.mark.soak
def test_quarantined_node_gets_no_replacements(tmp_path: Path) -> None:
    """Each worker on b dies in its first step; the fourth replacement starts on a."""
    settings = SETTINGS.model_copy(update={"steps": 400})
    undisturbed = run_in_processes(tmp_path / "undisturbed", settings, 1)
    faults = tuple(Fault("kill", f"w{number}", 0) for number in range(2, 5))
    run = run_in_processes(
        tmp_path / "run", settings, 3, faults=faults, node_of=all_but_two_on_b, quarantine_after=3
    )
    assert run.stopped.outcome == "completed", run.stopped
    lost = [(line["worker"], line["node"]) for line in run.lines_of("WorkerLost")]
    assert lost == [("w2", BAD_NODE), ("w3", BAD_NODE), ("w4", BAD_NODE)]
    [quarantined] = run.lines_of("NodeQuarantined")
    assert (quarantined["node"], quarantined["cause"]) == (
        BAD_NODE,
        "workers have crashed there 3 times",
    )
    assert [line["quarantined"] for line in run.lines_of("StartWorkers")] == [
        [],
        [],
        [],
        [BAD_NODE],
    ]
    node_of_worker = {line["worker"]: line["node"] for line in run.lines_of("WorkerReady")}
    assert node_of_worker["w5"] == "a"
    assert set(run.lines_of("Resume")[-1]["workers"]) == {"w0", "w1", "w5"}
    assert_survivors_kept(run, {"w0", "w1", "w5"})
    assert_no_step_repeated(run)
    assert run.losses() == pytest.approx(undisturbed.losses(), rel=1e-9)


@pytest.mark.soak
def test_the_only_node_is_never_quarantined(tmp_path: Path) -> None:
    settings = SETTINGS.model_copy(update={"steps": 300})
    faults = tuple(Fault("kill", f"w{number}", 0) for number in range(1, 5))
    run = run_in_processes(tmp_path, settings, 2, faults=faults, quarantine_after=3)
    assert run.stopped.outcome == "completed", run.stopped
    assert not run.lines_of("NodeQuarantined")
    assert set(run.lines_of("Resume")[-1]["workers"]) == {"w0", "w5"}
