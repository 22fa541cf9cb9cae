"""Costs of a simulation from the files of a run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from users_policy import users_policy
from written_runs import WrittenRun

from elastic.geometry.target_layout import TargetLayout
from elastic.geometry.training_job import Job
from elastic.protocol.commands import Abort, Reshard, StartWorkers
from elastic.protocol.events import PartFile, PartWritten, RunOpened, StateReady
from pipelines.errors import UserError
from pipelines.simulation.measured import measure
from pipelines.simulation.plan import plan_run
from pipelines.simulation.request import SimulateRequest

TRACE = "time,node,event\n" + "".join(f"0,n{i},add\n" for i in range(8)) + "60,n0,remove\n"


def write(path: Path) -> WrittenRun:
    """A run of two workers whose every cost is a round number."""
    run = WrittenRun(path, now=1000.0)
    (path / "recipe.json").write_text("{}")
    job = Job(num_microbatches=16, microbatch=1, state_bytes=10**8, steps=100)
    run.append_event(RunOpened(1, users_policy(max_workers=2), TargetLayout(), job))
    run.append_command(StartWorkers(("w0", "w1")))
    run.now += 7
    for worker in ("w0", "w1"):
        run.ready(worker)
    run.resume("w0", "w1")
    for _ in range(5):
        run.commit(step_s=2.0)
    run.append_event(PartWritten("w0", 1, run.step, PartFile("part-w0", 10**7, 0)))
    run.append_command(Abort(1, ("w0", "w1"), "a test"))
    run.now += 0.25
    run.append_command(Reshard(2, ("w0", "w1"), "live"))
    run.append_event(StateReady("w0", 2, 10**6, 10**6, 0.5, 1, 1, 2))
    run.resume("w0", "w1")
    run.commit(step_s=2.5)
    return run


def test_costs_are_medians_of_the_run(tmp_path: Path) -> None:
    measured = measure(write(tmp_path / "demo").folder)
    assert (measured.step_s, measured.num_workers) == (2.0, 2)
    assert (measured.state_bytes, measured.num_microbatches) == (10**8, 16)
    assert measured.costs["warm_up_s"] == 7
    assert measured.costs["first_step_s"] == 0.5
    assert measured.costs["bytes_per_s"] == 2e6
    assert measured.costs["storage_bytes_per_s"] > 0
    assert "form_s" not in measured.costs, "no Form was written"


def test_step_is_scaled_to_the_workers_of_the_trace(tmp_path: Path) -> None:
    write(tmp_path / "demo")
    trace = tmp_path / "t.csv"
    trace.write_text(TRACE)
    request = SimulateRequest(str(trace), from_run="demo", storage=str(tmp_path))
    run = plan_run(request)
    assert run.costs.step_s == pytest.approx(0.5), "2 s with 8 microbatches each, now 2"
    assert (run.job.num_microbatches, run.job.state_bytes) == (16, 10**8)
    given = plan_run(replace(request, step_s=3.0, state_bytes=5.0, batch=32))
    assert given.costs.step_s == 3
    assert given.costs.warm_up_s == 7
    assert (given.job.num_microbatches, given.job.state_bytes) == (32, 5)


def test_run_without_steps_is_refused(tmp_path: Path) -> None:
    run = WrittenRun(tmp_path / "demo")
    (tmp_path / "demo" / "recipe.json").write_text("{}")
    run.start(2)
    with pytest.raises(UserError, match="it has no measured steps"):
        measure(run.folder)
