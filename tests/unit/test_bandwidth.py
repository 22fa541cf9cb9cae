"""Measured bandwidths by class of node pair, and their effect on the cost of a layout."""

from __future__ import annotations

import pytest

from elastic.duties.bandwidth import median_speeds, with_microbatch_time
from elastic.geometry.layout import Layout
from elastic.geometry.target_layout import TargetLayout
from elastic.geometry.topology import Place
from elastic.geometry.training_job import Bandwidths, Capacity, Job
from elastic.planner.models.step_cost import step_cost

TOPOLOGY = {
    "a": Place("n1", "r1"),
    "b": Place("n1", "r1"),
    "c": Place("n2", "r1"),
    "d": Place("n3", "r2"),
}


def test_bandwidth_of_a_class_is_the_median_of_its_measurements() -> None:
    bandwidths = [
        ("a", "b", 9.0),
        ("b", "a", 7.0),
        ("a", "b", 8.0),
        ("c", "a", 5.0),
        ("d", "a", 1.0),
    ]
    assert median_speeds(bandwidths, TOPOLOGY) == Bandwidths(node=8.0, rack=5.0, far=1.0)
    assert median_speeds(bandwidths[:1], TOPOLOGY) == Bandwidths(node=9.0)


def test_workers_without_a_known_node_count_as_far() -> None:
    assert median_speeds([("x", "y", 2.0)], {}) == Bandwidths(far=2.0)


def test_microbatch_time_is_the_step_time_without_the_traffic() -> None:
    """Eight microbatches over four data ranks: a step takes two microbatches and an all-reduce of
    100 bytes, in which each worker sends 150."""
    job = Job(num_microbatches=8, param_bytes=100, bandwidths=Bandwidths(node=150.0))
    on_one_node = Capacity(4, node_size=4)
    informed_job = with_microbatch_time(job, Layout(dp=4), 3.0, on_one_node)
    assert informed_job.microbatch_s == pytest.approx((3.0 - 1.0) / 2)
    assert step_cost(TargetLayout(), informed_job, on_one_node)(
        4, 1
    ) * informed_job.microbatch_s == pytest.approx(3.0)
    assert with_microbatch_time(job, Layout(dp=4), 0.5, on_one_node).microbatch_s == pytest.approx(
        0.05 / 2
    )
    assert (
        with_microbatch_time(Job(num_microbatches=8), Layout(dp=4), 3.0, on_one_node).microbatch_s
        == 0.0
    )
    assert with_microbatch_time(job, None, 3.0, on_one_node) == job


def test_slow_link_raises_the_cost_of_an_axis_across_nodes() -> None:
    fast, slow = (
        Job(8, param_bytes=10**6, microbatch_s=1.0, bandwidths=Bandwidths(node=1e9, far=speed))
        for speed in (1e9, 1e5)
    )
    capacity = Capacity(4, node_size=2)
    within, across = (
        [step_cost(TargetLayout(), job, capacity)(dp=2, fsdp=fsdp) for job in (fast, slow)]
        for fsdp in (1, 2)
    )
    assert within[0] == pytest.approx(within[1])
    assert across[1] > across[0] + 1
