"""A straggler without a standby worker computes fewer microbatches: steps become shorter."""

from __future__ import annotations

from dataclasses import replace
from statistics import median

from sim.faults import Fault
from sim.scenario import Scenario, policy_of
from sim.simulation import simulate
from sim.world import World

from elastic.geometry.training_job import Job
from elastic.protocol.commands import Abort, Form, RecordStep
from elastic.protocol.notes import RolledBack, Warned

SLOW_FROM, FAST_FROM = 30, 150
NUM_STEPS = 320
STEP_S = 0.06


def simulate_four_workers(reduce: bool, *faults: Fault) -> World:
    """Four replicas with 24 microbatches; a report every five steps, three in a row."""
    policy = replace(
        policy_of(3, 4), straggler_every=5, straggler_factor=1.6, straggler_reduce=reduce
    )
    job = Job(24, steps=NUM_STEPS)
    return simulate(Scenario(1, policy, "dp=4", job, step_s=(STEP_S, STEP_S), faults=list(faults)))


def strikes(action: str, step: int) -> Fault:
    """World rank 0 begins to compute this step, in a run in which no step is redone."""
    return Fault(action, "compute", step - 1, only_world_rank_0=True)


def step_s(world: World, first: int, last: int) -> float:
    """The median time from one committed step to the next."""
    committed_at = {line.step: line.time for line in world.records.metrics}
    return median(committed_at[step] - committed_at[step - 1] for step in range(first, last))


def forms(world: World) -> list[Form]:
    commands = [c for _, _, commands, _ in world.records.trace for c in commands]
    assert not [c for c in commands if isinstance(c, Abort | RolledBack)]
    assert sum(isinstance(c, RecordStep) for c in commands) == NUM_STEPS, "no step is redone"
    return [command for command in commands if isinstance(command, Form)]


def test_steps_become_shorter_by_what_the_shares_save() -> None:
    world = simulate_four_workers(True, strikes("slow by 2", SLOW_FROM))
    assert [form.assignment.shares for form in forms(world)] == [(), (3, 7, 7, 7)]
    before, after = step_s(world, 31, 45), step_s(world, 60, NUM_STEPS)
    assert before > 2 * STEP_S
    assert after - 7 / 6 * STEP_S < before - 2 * STEP_S + 0.01, "the rest of a step is the same"
    assert before / after > 1.5


def test_shares_are_even_again_once_the_straggler_is_as_fast_as_the_others() -> None:
    world = simulate_four_workers(
        True, strikes("slow by 2", SLOW_FROM), strikes("slow by 1", FAST_FROM)
    )
    assert [form.assignment.shares for form in forms(world)] == [(), (3, 7, 7, 7), ()]
    warned = [c.text for _, _, cs, _ in world.records.trace for c in cs if isinstance(c, Warned)]
    assert "w0 computes 3 of 24 microbatches, others up to 7" in warned[1]
    assert "no worker is a straggler any more" in warned[2]
    assert step_s(world, 200, NUM_STEPS) < step_s(world, 60, FAST_FROM)


def test_without_the_setting_all_wait_for_the_straggler() -> None:
    world = simulate_four_workers(False, strikes("slow by 2", SLOW_FROM))
    assert [form.assignment.shares for form in forms(world)] == [()]
    assert step_s(world, 60, NUM_STEPS) > 2 * STEP_S


def test_shares_end_with_the_members_that_have_them() -> None:
    """The straggler is killed: the others, and the worker that replaces it, have even shares."""
    world = simulate_four_workers(True, strikes("slow by 2", SLOW_FROM), strikes("kill", FAST_FROM))
    commands = [c for _, _, commands, _ in world.records.trace for c in commands]
    shares = [c.assignment.shares for c in commands if isinstance(c, Form)]
    assert shares[:2] == [(), (3, 7, 7, 7)]
    assert set(shares[2:]) == {()}
