"""A straggler that no standby worker can replace computes fewer microbatches."""

from __future__ import annotations

import pytest
from test_core import open_run, ready_event
from test_growth import SteppedRun

from elastic.controller.capacity.next_assignment import next_assignment
from elastic.controller.core import Core
from elastic.controller.stragglers import shortened
from elastic.duties.poison_batches import note_lost_worker
from elastic.geometry.errors import Infeasible
from elastic.geometry.sample_order import even_shares
from elastic.geometry.target_layout import TargetLayout
from elastic.geometry.training_job import Job
from elastic.protocol.commands import Command, Pause
from elastic.protocol.controller_state import ControllerState
from elastic.protocol.events import ComputeTimed, StepCommitted, WorkerDraining, WorkerReady
from elastic.protocol.notes import Replaced, Warned
from elastic.protocol.phases import Pausing, Running
from elastic.protocol.votes import StepRecord, Vote
from elastic.protocol.wire import decode, encode

NUM_MICROBATCHES = 24


class TimedRun(SteppedRun):
    """Its steps take `step_s`."""

    step_s = 1.0

    def commit(self, num_steps: int = 1) -> None:
        state = self.core.state
        for _ in range(num_steps):
            self.now += self.step_s
            step, size = state.committed_step + 1, len(state.live.members())
            record = StepRecord(
                self.now, step, state.generation, size, 1.0, 8, 0.1, 1.0, self.step_s, False
            )
            vote = Vote(step, 8.0, 8, 1.0, size)
            self.deliver(StepCommitted(state.generation, record, vote))


def make_run(
    num_workers: int = 4, layout: str = "dp=4", device: str = "cpu", **policy: float
) -> TimedRun:
    """Workers that train 24 microbatches a step; those beyond the layout are on standby."""
    run = TimedRun(open_run(1, num_workers, straggler_every=5, **policy))
    run.core.state.layouts.target = TargetLayout.parse(layout, num_workers)
    run.core.state.job = Job(NUM_MICROBATCHES, steps=100_000)
    for worker in (f"w{i}" for i in range(num_workers)):
        event = ready_event(worker)
        run.deliver(WorkerReady(event.worker, event.node, 1, digest=event.digest, device=device))
    run.form()
    return run


def shares_of(run: TimedRun) -> tuple[int, ...]:
    held = run.core.state.live.held
    assert held is not None
    return held.assignment.shares


def report(
    run: TimedRun, slowness: dict[str, float], num_reports: int = 1, fixed: float = 0.0
) -> list[Command]:
    """Deliver reports of the time that each member takes for its microbatches, a second for each,
    and for `fixed` more, but for `slowness`. The slowest of them decides how long steps take."""
    commands: list[Command] = []
    for _ in range(num_reports):
        state, held = run.core.state, run.core.state.live.held
        assert held is not None
        layout = held.assignment.layout
        shares = held.assignment.shares or even_shares(NUM_MICROBATCHES, layout.num_data_ranks)
        compute_s = tuple(
            slowness.get(worker, 1.0) * (fixed + shares[layout.data_rank(world_rank)])
            for world_rank, worker in enumerate(held.assignment.members)
        )
        run.step_s = max(compute_s) / 10
        run.commit(5)
        commands += run.deliver(ComputeTimed(state.generation, state.committed_step, compute_s))
    return commands


def change_shares(
    run: TimedRun, slowness: dict[str, float], num_reports: int = 3, fixed: float = 0.0
) -> str:
    """The reason for the change that the last of these reports leads to."""
    assert not any(isinstance(c, Pause) for c in report(run, slowness, num_reports - 1, fixed))
    *_, warned, pause = report(run, slowness, fixed=fixed)
    assert isinstance(warned, Warned) and warned.kind == "straggler"
    assert isinstance(pause, Pause)
    run.pause()
    run.form()
    return warned.text


def test_straggler_gets_the_share_that_fits_its_speed() -> None:
    run = make_run()
    text = change_shares(run, {"w1": 3.0})
    assert shares_of(run) == (7, 2, 8, 7) or shares_of(run) == (8, 2, 7, 7)
    assert text == (
        "from the next step boundary on, w1 computes 2 of 24 microbatches, others up to 8: steps "
        "become up to 56% shorter"
    )
    assert run.core.state.live.members() == ("w0", "w1", "w2", "w3")
    assert report(run, {"w1": 3.0}, 50) == [], "these shares are the best ones"


def test_users_are_warned_that_no_standby_worker_can_replace_it() -> None:
    run = make_run()
    first, second = (c for c in report(run, {"w1": 3.0}, 3) if isinstance(c, Warned))
    assert "w1 on node is a straggler" in first.text
    assert "w1 computes 2 of 24" in second.text


def test_shares_are_not_reduced_without_the_setting() -> None:
    run = make_run(straggler_reduce=False)
    assert [type(c) for c in report(run, {"w1": 3.0}, 20)] == [Warned]


def test_standby_worker_replaces_the_straggler_instead() -> None:
    run = make_run(5)
    replaced, pause = report(run, {"w1": 3.0}, 3)
    assert isinstance(replaced, Replaced) and isinstance(pause, Pause)
    run.pause()
    run.form()
    assert shares_of(run) == ()


def test_standby_worker_that_arrives_later_replaces_it_and_shares_are_even() -> None:
    run = make_run(5)
    run.core.state.membership.draining.add("w4")
    change_shares(run, {"w1": 3.0})
    run.core.state.membership.draining.discard("w4")
    commands = report(run, {"w1": 3.0})
    assert [c.worker for c in commands if isinstance(c, Replaced)] == ["w1"]
    run.pause()
    run.form()
    assert shares_of(run) == () and "w4" in run.core.state.live.members()


def test_shares_are_even_again_once_the_straggler_has_recovered() -> None:
    run = make_run()
    change_shares(run, {"w1": 3.0})
    text = change_shares(run, {}, 6)
    assert text == "no worker is a straggler any more: microbatches are dealt evenly again"
    assert shares_of(run) == ()


def test_shares_follow_a_straggler_that_becomes_slower() -> None:
    run = make_run()
    change_shares(run, {"w1": 2.5})
    assert sorted(shares_of(run)) == [3, 7, 7, 7]
    report(run, {"w1": 2.5}, 3)
    change_shares(run, {"w1": 6.0}, 6)
    assert sorted(shares_of(run)) == [1, 7, 8, 8]


def test_worker_close_to_the_factor_does_not_alternate() -> None:
    run = make_run()
    change_shares(run, {"w1": 2.1})
    assert report(run, {"w1": 1.9}, 60) == []


@pytest.mark.parametrize("fixed", [3.0, 12.0])
def test_time_that_does_not_depend_on_the_share_is_no_slowness(fixed: float) -> None:
    """With a smaller share the straggler's time for a microbatch is longer than it was before."""
    run = make_run()
    change_shares(run, {"w1": 3.0}, fixed=fixed)
    shares = shares_of(run)
    assert sorted(shares) == [2, 7, 7, 8]
    assert report(run, {"w1": 3.0}, 20, fixed) == []
    change_shares(run, {}, 6, fixed)
    assert shares_of(run) == (), "it is as fast as the others"


def test_shares_that_do_not_make_steps_shorter_are_given_up() -> None:
    """Almost nothing depends on the share."""
    run = make_run()
    change_shares(run, {"w1": 3.0}, fixed=1000.0)
    text = change_shares(run, {"w1": 3.0}, fixed=1000.0)
    assert text == (
        "shares by speed have not made steps shorter: microbatches are dealt evenly again"
    )
    assert shares_of(run) == ()
    change_shares(run, {"w1": 3.0}, 12, fixed=1000.0)
    change_shares(run, {"w1": 3.0}, 3, fixed=1000.0)
    change_shares(run, {"w1": 3.0}, 48, fixed=1000.0)


def test_changes_are_made_ever_more_rarely_unless_they_last() -> None:
    run = make_run()
    change_shares(run, {"w1": 3.0}, 3)
    change_shares(run, {}, 6)
    change_shares(run, {"w1": 3.0}, 12)
    report(run, {"w1": 3.0}, 100)
    change_shares(run, {}, 3)


def test_only_reports_in_a_row_count() -> None:
    run = make_run()
    for _ in range(5):
        assert not any(isinstance(c, Pause) for c in report(run, {"w1": 3.0}, 2))
        assert report(run, {}) == []


def test_pause_that_costs_more_than_it_gains_is_not_made() -> None:
    run = make_run(growth_horizon_s=10.0)
    run.core.state.growth.pauses_s = [6.0]
    assert not any(isinstance(c, Pause) for c in report(run, {"w1": 3.0}, 10))
    run.core.state.growth.pauses_s = [5.0]
    assert any(isinstance(c, Pause) for c in report(run, {"w1": 3.0}, 10)), "56 % of 10 s"


def test_shares_end_with_the_members_that_have_them() -> None:
    run = make_run()
    change_shares(run, {"w1": 3.0})
    run.lose("w3")
    run.form()
    assert run.core.state.live.members() == ("w0", "w1", "w2")
    assert shares_of(run) == ()


def test_planned_shares_are_dropped_if_a_member_drains_before() -> None:
    run = make_run()
    report(run, {"w1": 3.0}, 3)
    assert isinstance(run.core.state.phase, Pausing)
    run.deliver(WorkerDraining("w3", "by hand"))
    run.pause()
    run.form()
    assert len(run.core.state.live.members()) == 3 and shares_of(run) == ()
    assert isinstance(run.core.state.phase, Running), "and no second pause is ordered"


def test_shares_stay_if_the_same_members_form_again() -> None:
    run = make_run()
    change_shares(run, {"w1": 3.0})
    state, shares = run.core.state, shares_of(run)
    assert state.live.held is not None
    proposal = next_assignment(state, state.live.held.assignment)
    assert not isinstance(proposal, Infeasible)
    assert proposal.assignment.shares == shares


def test_data_rank_is_as_slow_as_the_slowest_of_its_workers() -> None:
    run = make_run(8, "dp=4,tp=2")
    change_shares(run, {"w2": 3.0})
    slow = run.core.state.live.members().index("w2") // 2
    shares = shares_of(run)
    assert shares[slow] == 2 and len(shares) == 4


def test_pipelines_are_dealt_evenly() -> None:
    run = make_run(4, "dp=2,pp=2")
    assert not any(isinstance(c, Pause) for c in report(run, {"w1": 3.0}, 20))


def test_times_of_gpus_do_not_depend_on_the_share() -> None:
    """A GPU reports how long it takes for a fixed product, not for its microbatches."""
    run = make_run(device="cuda")
    state = run.core.state

    def report_products(num_reports: int) -> list[Command]:
        commands: list[Command] = []
        for _ in range(num_reports):
            run.step_s = 0.8 if shares_of(run) else 1.8
            run.commit(5)
            times = tuple(3.0 if w == "w1" else 1.0 for w in state.live.members())
            event = ComputeTimed(state.generation, state.committed_step, times)
            commands += run.deliver(event)
        return commands

    assert isinstance(report_products(3)[-1], Pause)
    run.pause()
    run.form()
    assert sorted(shares_of(run)) == [2, 7, 7, 8]
    assert report_products(30) == []


@pytest.mark.parametrize("num_before", [0, 1, 2])
def test_restarted_controller_plans_the_same_shares(num_before: int) -> None:
    run = make_run()
    report(run, {"w1": 3.0}, num_before)
    restarted = TimedRun(Core(decode(ControllerState, encode(run.core.state))))
    restarted.now = run.now
    change_shares(restarted, {"w1": 3.0}, 3 - num_before)
    change_shares(run, {"w1": 3.0}, 3 - num_before)
    assert shares_of(restarted) == shares_of(run) != ()


def test_shortened_report_leads_to_the_same_shares() -> None:
    """A journal may list only the slow world ranks; under unequal shares also those below the
    factor."""
    run = make_run()
    change_shares(run, {"w1": 3.0})
    state = run.core.state
    run.commit(5)
    shares = shares_of(run)
    compute_s = (1.0 * shares[0], 1.7 * shares[1], 1.0 * shares[2], 1.0 * shares[3])
    whole = ComputeTimed(state.generation, state.committed_step, compute_s)
    short = shortened(state, whole)
    assert short.slow == ((1, pytest.approx(1.7)),) and not short.compute_s
    one, other = (Core(decode(ControllerState, encode(state))) for _ in range(2))
    assert one.step(run.now, whole) == other.step(run.now, short)
    assert encode(one.state) == encode(other.state)


def test_lost_worker_ran_the_microbatches_of_its_share() -> None:
    run = make_run()
    change_shares(run, {"w1": 3.0})
    shares = shares_of(run)
    note_lost_worker(run.core.state, "w1")
    [(_, ran)] = run.core.state.poison.fatal
    assert ran == tuple(range(shares[0], shares[0] + shares[1]))
