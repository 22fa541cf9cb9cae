"""The controller and scripts: they may end a run early, and have something to do at its end."""

from __future__ import annotations

from test_core import commit, deliver, finish_forming, open_with_layout, ready_event

from elastic.controller.core import Core
from elastic.geometry.training_job import Job
from elastic.protocol.commands import SaveCheckpoint
from elastic.protocol.events import Paused, Quiesced, WorkerLost
from elastic.protocol.phases import Aborting


def open_script(steps: int, runs_script: bool = True) -> Core:
    core = open_with_layout("dp=2", Job(4, steps=steps, runs_script=runs_script), 2)
    deliver(core, ready_event("w0"), ready_event("w1"))
    finish_forming(core)
    return core


def test_script_that_leaves_its_loop_ends_the_run_as_completed() -> None:
    core = open_script(steps=10)
    commit(core, 1)
    commands = deliver(core, Paused("w0", 1, 1, is_last=True), Paused("w1", 1, 1, is_last=True))
    assert [type(command) for command in commands] == [SaveCheckpoint]
    assert core.state.ending is not None and core.state.ending.outcome == "completed"
    assert core.state.job.steps == 1


def test_worker_lost_below_the_loop_does_not_end_the_run_before_another_has_run_it() -> None:
    outcomes = {}
    for runs_script in (False, True):
        core = open_script(1, runs_script)
        commit(core, 1)
        deliver(core, Paused("w1", 1, 1), WorkerLost("w0", "killed"))
        assert isinstance(core.state.phase, Aborting)
        deliver(core, Quiesced("w1", 1, 1), ready_event("w2"), now=99.0)
        outcomes[runs_script] = core.state.ending
    assert outcomes[False] is not None and outcomes[False].outcome == "completed"
    assert outcomes[True] is None


def test_run_that_cannot_run_its_end_is_completed_at_last() -> None:
    core = open_script(1)
    commit(core, 1)
    core.state.forming.num_attempts = core.state.policy.max_attempts
    deliver(core, WorkerLost("w0", "killed"), Quiesced("w1", 1, 1), now=99.0)
    assert core.state.ending is not None and core.state.ending.outcome == "completed"
