"""Stragglers: a standby worker replaces them at a step boundary; without one the run warns."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import Outcome, run_in_processes
from run_checks import assert_no_step_repeated

from actors.runtime.fault_spec import Fault
from pipelines.run.recipes import tiny
from pipelines.settings import DataSettings

SETTINGS = tiny().model_copy(
    update={
        "data": DataSettings(source="random", seq_len=16),
        "dtype": "float64",
        "steps": 60,
        "batch": 12,
    }
)
SLOW = Fault("slow", "w1", 10, factor=6.0)
WATCHED = {"straggler_every": 5, "straggler_reduce": False}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return run_in_processes(tmp_path_factory.mktemp("undisturbed"), SETTINGS, 1)


def test_straggler_is_replaced_by_a_standby_worker(tmp_path: Path, undisturbed: Outcome) -> None:
    run = run_in_processes(tmp_path, SETTINGS, 4, layout="dp=3", faults=(SLOW,), **WATCHED)
    assert run.stopped.outcome == "completed", run.stopped
    [replaced] = run.lines_of("Replaced")
    assert replaced["worker"] == "w1" and "times as long as the others" in replaced["cause"]
    members = [set(line["workers"]) for line in run.lines_of("Resume")]
    assert members == [{"w0", "w1", "w2"}, {"w0", "w2", "w3"}]
    assert not run.lines_of("Abort"), "the straggler is drained"
    assert_no_step_repeated(run)
    assert run.losses() == pytest.approx(undisturbed.losses(), rel=1e-9)


@pytest.mark.slow
def test_straggler_without_a_standby_worker_is_reported_once(
    tmp_path: Path, undisturbed: Outcome
) -> None:
    run = run_in_processes(tmp_path, SETTINGS, 3, faults=(SLOW,), **WATCHED)
    assert run.stopped.outcome == "completed", run.stopped
    [warning] = [line for line in run.lines_of("Warned") if line["kind"] == "straggler"]
    assert "w1 on this-machine is a straggler" in warning["text"]
    assert len(run.lines_of("Resume")) == 1
    assert_no_step_repeated(run)
    assert run.losses() == pytest.approx(undisturbed.losses(), rel=1e-9)


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param("dp=3", marks=pytest.mark.slow),
        pytest.param("fsdp=3", marks=pytest.mark.soak),
        pytest.param("dp=2,pp=2", marks=pytest.mark.slow),
        pytest.param("tp=2", marks=pytest.mark.soak),
    ],
)
def test_worker_that_waits_for_a_straggler_is_not_reported(tmp_path: Path, layout: str) -> None:
    """All steps take equally long; only the compute time shows which worker is slow."""
    workers = {"dp=2,pp=2": 4, "tp=2": 2}.get(layout, 3)
    settings = SETTINGS.model_copy(update={"steps": 30})
    run = run_in_processes(tmp_path, settings, workers, layout=layout, faults=(SLOW,), **WATCHED)
    [members] = [line["workers"] for line in run.lines_of("Resume")]
    for report in run.lines_of("ComputeTimed")[3:]:
        if not report[
            "compute_s"
        ]:  # all times together would be too long: the report has only stragglers
            assert [members[world_rank] for world_rank, _ in report["slow"]] == ["w1"], report
            continue
        times = dict(zip(members, report["compute_s"], strict=True))
        slow_s = times.pop("w1")
        assert max(times.values()) < slow_s / 1.5, report
