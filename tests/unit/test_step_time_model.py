"""The step-time model with measured facts: trials, collectives, contention and overlap."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastic.geometry.layout import Layout
from elastic.geometry.target_layout import TargetLayout
from elastic.geometry.training_job import (
    Bandwidths,
    Capacity,
    CollectiveTimes,
    Job,
    Machine,
    MemoryFacts,
    StepTrial,
    TimeFacts,
    Traffic,
)
from elastic.planner.models.collective_times import Links, overlapped
from elastic.planner.models.step_cost import StepParts, step_parts

PLAIN = StepTrial(step_s=0.5, pass_s=0.25, microbatch_s=1.0)
SHARDED = StepTrial(zero=3, step_s=0.75, pass_s=1.25, microbatch_s=1.0)
CUT = StepTrial(
    tp=2,
    step_s=0.5,
    pass_s=0.25,
    microbatch_s=0.5,
    traffic=(Traffic("all_reduce", 4, 0.0, 400.0),),
)
JOB = Job(
    num_microbatches=8,
    param_bytes=100,
    layer_costs=(1,) * 4,
    microbatch_s=PLAIN.single_s,
    memory=MemoryFacts(merges=True, num_blocks=4, sums_whole=True),
    times=TimeFacts((PLAIN, SHARDED, CUT)),
)
TABLES = tuple(
    CollectiveTimes(kind, 2, ((0.0, 0.125), (100.0, 0.125), (200.0, 0.25)))
    for kind in ("all_reduce", "all_gather", "reduce_scatter", "shift")
)


def parts_of(layout: str, job: Job, node_size: int = 4) -> StepParts:
    parsed = Layout.parse(layout)
    axes = TargetLayout(parsed.pp, parsed.cp, parsed.tp, 1, parsed.zero, 1)
    return step_parts(axes, job, Capacity(4, None, node_size))(parsed.dp, parsed.fsdp)


def on(machine: Machine) -> Job:
    return replace(JOB, times=replace(JOB.times, machine=machine))


def test_compute_is_a_step_its_passes_and_their_microbatches() -> None:
    assert parts_of("dp=2", JOB).compute == 0.5 + 0.25 + 4 * 1.0
    single = replace(JOB, times=replace(JOB.times, merges=False))
    assert parts_of("dp=2", single).compute == 0.5 + 4 * (0.25 + 1.0)


def test_sharding_adds_what_its_trial_took_more() -> None:
    assert parts_of("fsdp=2", JOB).compute == pytest.approx(0.75 + 1.25 + 4 * 1.0)


def test_faster_microbatch_scales_all_trials() -> None:
    faster = replace(JOB, microbatch_s=0.5 * JOB.microbatch_s)
    assert parts_of("tp=2", faster).compute == 0.5 * (0.75 + 8 * 0.5)


def test_more_workers_than_cores_slow_each_other_down() -> None:
    crowded = on(Machine(cores=2))
    assert parts_of("dp=4", crowded).compute == 2 * parts_of("dp=4", JOB).compute
    assert parts_of("dp=2", crowded).compute == parts_of("dp=2", JOB).compute
    spread = parts_of("dp=4", crowded, node_size=2)
    assert spread.compute == parts_of("dp=4", JOB).compute


def test_collectives_that_the_trial_saw_take_their_time_in_each_pass() -> None:
    """Four all-reduces of 100 bytes for each of eight microbatches, merged in one pass."""
    job = on(Machine(collectives=TABLES))
    at_800_bytes = 0.125 + 700 * 0.125 / 100
    assert parts_of("tp=2", job).tp == pytest.approx(4 * at_800_bytes)


def test_table_is_interpolated_and_larger_groups_take_longer() -> None:
    links = Links.of(Machine(collectives=TABLES), Bandwidths(), Capacity(8, None, 8), 8)
    assert links.seconds("all_reduce", 2, 50, 2) == 0.125
    assert links.seconds("all_reduce", 2, 150, 2) == pytest.approx(0.1875)
    assert links.seconds("all_reduce", 2, 300, 2) == pytest.approx(0.375)
    assert links.seconds("all_reduce", 4, 0, 4) == pytest.approx(0.25)
    assert links.seconds("shift", 4, 0, 4) == 0.125
    assert links.seconds("all_reduce", 1, 10**9, 1) == 0.0


def test_groups_on_the_same_cores_wait_for_each_other() -> None:
    links = Links.of(Machine(cores=2, collectives=TABLES), Bandwidths(), Capacity(4, None, 4), 4)
    assert links.seconds("all_reduce", 2, 50, 2) == 2 * 0.125


def test_beyond_the_node_bandwidth_and_latency_count() -> None:
    machine = Machine(latency_s=0.5, collectives=TABLES)
    links = Links.of(machine, Bandwidths(far=10.0), Capacity(4, None, 2), 4)
    assert links.seconds("all_reduce", 4, 100, 4) == pytest.approx(0.5 + 150 / 10)


def test_communication_beside_compute_is_hidden_but_for_the_interference() -> None:
    assert overlapped(3.0, 2.0, 0.0) == 3.0
    assert overlapped(3.0, 2.0, 1.0) == 5.0
    hidden = parts_of("dp=2", on(Machine(interference=0.0, collectives=TABLES)))
    seen = parts_of("dp=2", on(Machine(interference=1.0, collectives=TABLES)))
    assert hidden.dp == seen.dp == 0.125, "all gradients are one small bucket: the last"
    many = replace(JOB, param_bytes=32 << 20)
    slow = tuple(replace(t, points=((0.0, 0.0), (float(8 << 20), 0.125))) for t in TABLES)
    hidden, seen = (
        parts_of("dp=2", replace(many, times=replace(JOB.times, machine=machine)))
        for machine in (Machine(interference=share, collectives=slow) for share in (0.0, 1.0))
    )
    assert hidden.dp == pytest.approx(0.125) and seen.dp == pytest.approx(0.5)
