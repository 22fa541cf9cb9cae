"""Fixed models of systems that restart at every change of the workers."""

from __future__ import annotations

import pytest

from elastic.simulation.costs import Costs
from elastic.simulation.restarts import (
    RestartLimits,
    RestartRun,
    RestartSystem,
    run_with_restarts,
)
from elastic.simulation.trace import parse_trace

COSTS = Costs(warm_up_s=10, detect_s=4, save_s=0.0)
HEAD = "time,node,event\n0,a,add\n0,b,add\n"


def run_trace(text: str, steps: int = 10**9, min_workers: int = 1) -> RestartRun:
    """A step takes 2 s with one worker and 1 s with two."""
    limits = RestartLimits(min_workers, 2, 1, steps, lambda number: (2.0 / number, number))
    return run_with_restarts(RestartSystem("restarts", 5.0), parse_trace(text), COSTS, limits)


def test_without_changes_only_the_start_is_lost() -> None:
    run = run_trace(f"{HEAD}1010,c,add\n")
    assert (run.steps, run.num_redone, run.pauses_s) == (1000, 0, [])
    assert run.worker_s == 2000


def test_loss_costs_detection_restart_and_the_steps_since_the_checkpoint() -> None:
    run = run_trace(f"{HEAD}500.5,b,remove\n1000.5,c,add\n1100,d,add\n")
    # 490 steps, then 9 s without, then a step of 2 s each, until c has warmed up at 1010.5
    assert run.pauses_s[0] == pytest.approx(9.5)
    assert run.pauses_s[1] == pytest.approx(5 + 1, abs=1)
    assert 0 < run.num_redone < 20
    num_done = 490 + int((1010.5 - 509.5) / 2) + int((1100 - 1015.5) / 1)
    assert run.steps == num_done - run.num_redone
    assert run.committed_s < 1100 - sum(run.pauses_s)


def test_run_that_is_too_small_does_not_train() -> None:
    run = run_trace(f"{HEAD}510,b,remove\n1010,c,add\n1011,d,add\n", min_workers=2)
    assert run.steps <= 500


def test_run_ends_with_its_last_step() -> None:
    run = run_trace(f"{HEAD}1010,c,add\n", steps=100)
    assert (run.steps, run.finish_s) == (100, 110)


def test_rack_that_is_lost_at_once_is_one_restart() -> None:
    run = run_trace(f"{HEAD}500,a,remove\n500,b,remove\n600,c,add\n600,d,add\n1000,e,add\n")
    assert len(run.pauses_s) == 1
    assert run.pauses_s[0] == pytest.approx(600 + 10 + 5 - 500, abs=1)
