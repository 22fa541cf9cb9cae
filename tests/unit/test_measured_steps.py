"""Predicted step times are compared with measured ones, and later choices learn from them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from test_hangs import SteppedCore

from elastic.duties.bandwidth import corrected_job, known_job
from elastic.geometry.layout import Layout
from elastic.geometry.target_layout import TargetLayout
from elastic.geometry.training_job import Bandwidths, Capacity, Corrections, Job, TimeFacts
from elastic.planner.layout_choice import plan_layout
from elastic.planner.models.measured_steps import MOST, NUM_COMPARED, MeasuredSteps
from elastic.planner.models.step_cost import cost_of
from elastic.protocol.commands import Command
from elastic.protocol.events import Quiesced, StepCommitted, WorkerLost, WorkerReady
from elastic.protocol.notes import StepTimeCompared
from elastic.protocol.votes import StepRecord, Vote

FOUR, THREE, TWO = Layout(dp=4), Layout(dp=3), Layout(dp=2)


def measured_under(layout: Layout, step_s: float) -> MeasuredSteps:
    steps = MeasuredSteps()
    train(steps, layout, step_s)
    return steps


def train(steps: MeasuredSteps, layout: Layout, step_s: float) -> list[float]:
    """Train for some steps; returns the predictions that were compared."""
    compared = []
    for _ in range(NUM_COMPARED + 4):
        steps.note(layout, step_s)
        if expected := steps.compare():
            compared.append(expected.seconds)
    return compared


def test_a_new_layout_is_compared_once() -> None:
    steps = measured_under(FOUR, 1.0)
    steps.expect(THREE, 1.2)
    assert train(steps, THREE, 1.5) == [1.2]
    assert train(steps, THREE, 1.5) == []


def test_few_steps_are_not_compared() -> None:
    steps = measured_under(FOUR, 1.0)
    steps.expect(THREE, 1.2)
    for _ in range(NUM_COMPARED - 1):
        steps.note(THREE, 1.5)
        assert steps.compare() is None


@pytest.mark.parametrize("seconds", [0.0, 1.0])
def test_the_present_layout_and_an_unknown_prediction_are_not_compared(seconds: float) -> None:
    steps = measured_under(FOUR, 1.0)
    steps.expect(FOUR if seconds else THREE, seconds)
    assert steps.expected is None


def test_right_predictions_correct_nothing() -> None:
    steps = measured_under(FOUR, 1.0)
    steps.expect(THREE, 1.5)
    train(steps, THREE, 1.5)
    corrections = steps.corrections()
    assert [corrections.of(layout) for layout in (TWO, THREE, FOUR)] == pytest.approx([1.0] * 3)


def test_a_slower_layout_counts_more_with_each_comparison() -> None:
    """The model says 1.2 s for three workers each time; they take 1.5 s, four take 1 s."""
    steps = measured_under(FOUR, 1.0)
    factors = []
    for _ in range(6):
        factors.append(steps.corrections().of(THREE))
        steps.expect(THREE, 1.2 * factors[-1])
        train(steps, THREE, 1.5)
        steps.expect(FOUR, 1.25 * steps.corrections().of(FOUR))
        train(steps, FOUR, 1.0)
    assert factors[0] == 1.0
    assert factors == sorted(factors) and 1.05 < factors[1] < factors[-1] < 1.25
    assert factors[-1] == pytest.approx(1.25, rel=0.06)


def test_other_layouts_get_the_mean_error() -> None:
    steps = measured_under(FOUR, 1.0)
    steps.expect(THREE, 1.2)
    train(steps, THREE, 1.44)
    corrections = steps.corrections()
    assert corrections.of(FOUR) < corrections.of(TWO) < corrections.of(THREE) == 1.0


def test_a_correction_is_bounded() -> None:
    steps = measured_under(FOUR, 1.0)
    steps.expect(THREE, 1.0)
    train(steps, THREE, 50.0)
    assert steps.corrections().of(FOUR) == pytest.approx(1 / MOST)


def test_corrections_decide_between_layouts_of_similar_cost() -> None:
    job = Job(8, state_bytes=1600, param_bytes=400, microbatch_s=1.0, bandwidths=Bandwidths(1e9))
    capacity = Capacity(4, node_size=4)
    best = plan_layout(None, capacity, TargetLayout(), job, snapshots_cover=True)
    corrections = Corrections(((best.layout, MOST),))
    slower = replace(job, times=TimeFacts(corrections=corrections))
    second = plan_layout(None, capacity, TargetLayout(), slower, snapshots_cover=True)
    assert second.layout != best.layout
    assert cost_of(best.layout, slower, capacity) == MOST * cost_of(best.layout, job, capacity)


class TimedCore(SteppedCore):
    """A core whose steps take a given time."""

    def train(self, step_s: float) -> list[Command]:
        commands = []
        for _ in range(NUM_COMPARED):
            state, num = self.core.state, len(self.workers)
            step, generation = state.committed_step + 1, state.generation
            record = StepRecord(0.0, step, generation, num, 1.0, 1, 0.1, 1.0, step_s, skipped=False)
            self.now += step_s
            commands += self.deliver(
                StepCommitted(generation, record, Vote(step, 1.0, 1, 1.0, num))
            )
        return commands


def test_a_run_compares_a_layout_that_is_new_to_it() -> None:
    run = TimedCore(4, job=Job(12, steps=1000, state_bytes=1600, param_bytes=400))
    state = run.core.state
    state.job = replace(state.job, bandwidths=Bandwidths(1e9, 1e9, 1e9))
    assert not any(isinstance(command, StepTimeCompared) for command in run.train(0.9))
    generation, step = state.generation, state.committed_step
    survivors = [Quiesced(w, generation, step) for w in run.workers[:3]]
    run.deliver(WorkerLost("w3", "killed"), *survivors)
    run.workers = run.workers[:3]
    run.form()
    [compared] = [c for c in run.train(1.5) if isinstance(c, StepTimeCompared)]
    assert compared.layout == str(run.core.state.live.held.assignment.layout)
    assert compared.predicted_s == pytest.approx(1.2, rel=0.01)  # 4 microbatches, not 3
    assert compared.measured_s == 1.5
    assert corrected_job(run.core.state).times.corrections.by_layout
    assert not known_job(run.core.state).times.corrections.by_layout
    run.deliver(WorkerReady("w4", "node", 1))
