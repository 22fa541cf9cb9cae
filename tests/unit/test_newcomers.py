"""Workers that keep generations from forming do not end a run whose members hold the state."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from test_growth import SteppedRun
from test_growth_rounds import opened_run

from elastic.protocol.commands import Command, StopWorker
from elastic.protocol.events import GroupFormed, Quiesced, WorkerLost, WorkerRaised, WorkerReady
from elastic.protocol.phases import Aborting, Forming, Pausing, Running

Break = Callable[[SteppedRun], object]


def run_of_three() -> SteppedRun:
    run = opened_run(min_workers=3, start_timeout_s=0.0, growth_wait_s=0.1)
    run.join("w0", "w1", "w2")
    run.form()
    return run


def ready_on(worker: str, node: str) -> WorkerReady:
    return WorkerReady(worker, node, 1, digest="same")


def join_on(run: SteppedRun, **nodes: str) -> None:
    """Workers become ready on these nodes, and the run pauses for them."""
    for worker, node in nodes.items():
        run.deliver(ready_on(worker, node))
    grow(run)


def grow(run: SteppedRun) -> None:
    """Train until the run pauses for the workers that wait."""
    for _ in range(10_000):
        if isinstance(run.core.state.phase, Pausing):
            run.pause()
            assert isinstance(run.core.state.phase, Forming)
            return
        run.commit()
    raise AssertionError("it does not grow")


def members(run: SteppedRun) -> tuple[str, ...]:
    phase = run.core.state.phase
    assert isinstance(phase, Forming)
    return phase.attempt.assignment.members


def time_out(run: SteppedRun) -> None:
    phase = run.core.state.phase
    assert isinstance(phase, Forming)
    run.now = phase.deadline
    run.wake()


def raise_for_a_peer(run: SteppedRun) -> None:
    run.deliver(WorkerRaised("w0", run.core.state.generation, "peer", "connection refused"))


def unwind(run: SteppedRun) -> list[Command]:
    state = run.core.state
    assert isinstance(state.phase, Aborting)
    pending = sorted(state.phase.pending)
    return run.deliver(*(Quiesced(w, state.generation, state.committed_step) for w in pending))


@pytest.mark.parametrize("breaks", [time_out, raise_for_a_peer])
def test_members_go_on_without_a_newcomer_that_cannot_connect(breaks: Break) -> None:
    run = run_of_three()
    join_on(run, w3="bad")
    assert members(run) == ("w0", "w1", "w2", "w3")
    breaks(run)
    unwind(run)
    assert members(run) == ("w0", "w1", "w2")
    run.form()

    grow(run)
    assert members(run) == ("w0", "w1", "w2", "w3"), "it may have been something else"
    breaks(run)
    commands = unwind(run)
    assert [c.worker for c in commands if isinstance(c, StopWorker)] == ["w3"]
    assert members(run) == ("w0", "w1", "w2")
    run.form()
    assert isinstance(run.core.state.phase, Running) and run.core.state.ending is None
    assert [crash.node for crash in run.core.state.quarantine.crashes] == ["bad"]
    assert not run.core.state.forming.deferred


def test_the_bad_one_of_several_newcomers_is_found_by_halves() -> None:
    """w5 breaks every attempt. The others become members."""
    run = run_of_three()
    join_on(run, **{f"w{i}": f"node{i}" for i in range(3, 11)})
    stopped: list[str] = []
    num_broken = 0
    while not stopped:
        if "w5" in members(run):
            time_out(run)
            num_broken += 1
            stopped += [c.worker for c in unwind(run) if isinstance(c, StopWorker)]
        run.form()
        if not stopped:
            grow(run)
    assert stopped == ["w5"]
    assert num_broken <= 5
    while len(run.core.state.live.members()) < 10:
        grow(run)
        run.form()
    assert run.core.state.forming.deferred == {}


def test_newcomers_of_a_broken_attempt_are_needed_if_the_members_are_too_few() -> None:
    run = run_of_three()
    run.lose("w2")
    run.deliver(ready_on("w3", "other"))
    run.wake()
    assert members(run) == ("w0", "w1", "w3")
    time_out(run)
    unwind(run)
    assert members(run) == ("w0", "w1", "w3"), "three are the minimum"


def test_a_loss_while_a_generation_forms_blames_no_newcomer() -> None:
    run = run_of_three()
    join_on(run, w3="other", w4="another")
    run.deliver(WorkerLost("w4", "killed"))
    unwind(run)
    assert members(run) == ("w0", "w1", "w2", "w3")
    assert run.core.state.forming.deferred == {}


def test_a_newcomer_whose_program_does_not_build_is_stopped() -> None:
    run = run_of_three()
    join_on(run, w3="full", w4="other")
    run.deliver(WorkerRaised("w3", run.core.state.generation, "program", "No space left on device"))
    commands = unwind(run)
    assert [c.worker for c in commands if isinstance(c, StopWorker)] == ["w3"]
    assert members(run) == ("w0", "w1", "w2", "w4")
    assert run.core.state.ending is None
    assert [crash.node for crash in run.core.state.quarantine.crashes] == ["full"]


def test_a_program_that_fails_on_members_too_ends_the_run() -> None:
    run = run_of_three()
    join_on(run, w3="other")
    generation = run.core.state.generation
    run.deliver(*(WorkerRaised(w, generation, "program", "a bug") for w in ("w3", "w0")))
    unwind(run)
    ending = run.core.state.ending
    assert ending is not None and ending.outcome == "failed" and "a bug" in ending.reason


def test_a_newcomer_that_hangs_while_a_generation_forms_does_not_hold_up_the_members() -> None:
    run = run_of_three()
    join_on(run, w3="hung")
    state, generation = run.core.state, run.core.state.generation
    run.deliver(*(GroupFormed(w, generation) for w in ("w0", "w1", "w2")))
    time_out(run)
    began = run.now
    step = state.committed_step
    run.deliver(*(Quiesced(w, generation, step) for w in ("w0", "w1", "w2")))
    commands = run.wake()
    assert [c.worker for c in commands if isinstance(c, StopWorker)] == ["w3"]
    assert run.now - began <= state.policy.hang_timeout_s < state.policy.collective_timeout_s
    assert members(run) == ("w0", "w1", "w2")
    assert [crash.node for crash in state.quarantine.crashes] == ["hung"]


def test_a_standby_that_waited_long_and_dies_while_a_generation_forms_counts_as_a_crash() -> None:
    run = run_of_three()
    run.now += 100.0
    join_on(run, w3="other")
    run.now += 60.0
    run.deliver(WorkerLost("w3", "gone"))
    [crash] = run.core.state.quarantine.crashes
    assert crash.node == "other" and not crash.is_excused


def test_one_bad_machine_does_not_end_a_run_whose_other_workers_still_start() -> None:
    run = opened_run()
    records = run.core.state.membership.records
    dead = sorted(records)[:8]
    run.deliver(*(WorkerLost(worker, "exit code -11", "bad") for worker in dead))
    assert run.core.state.ending is None
    others = [worker for worker in sorted(records) if worker not in dead]
    run.join(*others[:5])
    assert run.core.state.ending is None


def test_a_program_that_dies_on_all_machines_ends_the_run() -> None:
    run = opened_run()
    num_dead = 0
    while run.core.state.ending is None:
        for worker in sorted(run.core.state.membership.records):
            run.deliver(WorkerLost(worker, "exit code -11", f"node of {worker}"))
            num_dead += 1
        if run.core.state.ending is None:
            run.wake()
        assert num_dead <= 300
    assert "workers die while they start" in run.core.state.ending.reason
