"""Layout choice on small cases: the layout if the target does not fit, and the reason."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from elastic.geometry.errors import Infeasible
from elastic.geometry.layout import Layout
from elastic.geometry.model_limits import Limits
from elastic.geometry.target_layout import TargetLayout
from elastic.geometry.training_job import Bandwidths, Capacity, Job, MemoryFacts, PassMemory
from elastic.planner.layout_choice import LayoutChoice, plan_layout
from elastic.planner.models.memory_model import least_fitting, worker_bytes
from elastic.planner.models.step_cost import costliest_share, step_cost

JOB = Job(num_microbatches=8)
TRANSFORMER = Limits(tp_divides=4, num_layers=6, seq_len=64, num_experts=1)


def choose(
    target_layout: str, num_workers: int, job: Job = JOB, memory_bytes: int | None = None
) -> LayoutChoice | Infeasible:
    capacity = Capacity(num_workers, memory_bytes)
    return plan_layout(
        None, capacity, TargetLayout.parse(target_layout), job, snapshots_cover=False
    )


def layout_of(target_layout: str, num_workers: int, **kwargs: object) -> str:
    choice = choose(target_layout, num_workers, **kwargs)  # type: ignore[arg-type]
    assert isinstance(choice, LayoutChoice), choice
    assert choice.reason
    return str(choice.layout)


@pytest.mark.parametrize(
    ("target_layout", "num_workers", "layout"),
    [
        ("pp=2,dp=1", 2, "pp=2"),
        ("pp=2,dp=1", 1, "dp=1"),
        ("pp=4,dp=1", 3, "dp=3"),
        ("tp=2,dp=2", 4, "dp=2,tp=2"),
        ("tp=2,dp=2", 2, "tp=2"),
        ("tp=2,dp=2", 1, "dp=1"),
        ("pp=2,cp=2,tp=2,vp=2,dp=2", 16, "pp=2,dp=2,cp=2,tp=2,vp=2"),
        ("pp=2,cp=2,tp=2,vp=2,dp=2", 15, "pp=2,cp=2,tp=2,vp=2"),
        ("pp=2,cp=2,tp=2,vp=2,dp=2", 7, "dp=3,tp=2"),
        ("pp=2,cp=2,tp=2,vp=2,dp=2", 4, "dp=4"),
        ("fsdp=4,ep=4", 4, "fsdp=4,ep=4"),
        ("fsdp=4,ep=4", 3, "dp=1,fsdp=2,ep=2"),
    ],
)
def test_model_axes_change_only_if_they_no_longer_fit(
    target_layout: str, num_workers: int, layout: str
) -> None:
    assert layout_of(target_layout, num_workers) == str(Layout.parse(layout))


def test_model_axes_use_workers_that_microbatches_cannot_feed() -> None:
    """Eight workers would be dp=8, but two microbatches feed only two data ranks."""
    small_job = Job(num_microbatches=2)
    assert layout_of("pp=4,tp=4,dp=1", 8, job=small_job) == "dp=2,tp=4"


def test_replacement_model_axes_respect_the_limits_of_the_model() -> None:
    job = Job(num_microbatches=1, limits=TRANSFORMER)
    choice = choose("tp=4", 3, job)
    assert isinstance(choice, LayoutChoice)
    assert str(choice.layout) == "tp=2"
    assert any("tp=3 does not divide 4" in refusal for refusal in choice.refusals)
    assert choice.refusals[0].startswith(
        "pp=1, cp=1, tp=4 need at least 4 workers, only 3 available"
    )


def test_target_layout_outside_the_model_limits_is_refused() -> None:
    job = Job(num_microbatches=8, limits=TRANSFORMER)
    choice = choose("tp=3", 6, job)
    assert isinstance(choice, Infeasible) and "tp=3 does not divide 4" in choice.reason
    deep_choice = choose("pp=4,vp=2", 8, Job(num_microbatches=8, layer_costs=(1,) * 7))
    assert deep_choice == Infeasible("pp x vp = 8 stages, but only 7 layers have costs")


def test_virtual_stages_are_reduced_to_the_number_of_layers() -> None:
    """There is memory for a third of the state, and microbatches for only one data rank."""
    job = Job(num_microbatches=1, state_bytes=120, margin=1.0, limits=TRANSFORMER)
    assert layout_of("pp=3,cp=2,vp=2,dp=1", 5, job=job, memory_bytes=40) == "pp=3,vp=2"
    assert layout_of("pp=2,cp=2,vp=3,dp=1", 3, job=job, memory_bytes=40) == "pp=3,vp=2"


def test_model_axis_is_raised_only_for_memory_and_within_a_limit() -> None:
    unbounded = Job(num_microbatches=1, state_bytes=120, margin=1.0)
    assert isinstance(choose("", 4, unbounded, 40), Infeasible)
    bounded = Job(num_microbatches=1, state_bytes=120, margin=1.0, limits=TRANSFORMER)
    assert layout_of("", 4, job=bounded, memory_bytes=30) == "tp=4"
    assert layout_of("", 3, job=bounded, memory_bytes=40) == "pp=3"
    assert layout_of("", 4, job=bounded, memory_bytes=120) == "dp=1"
    refused = choose("", 4, bounded, 19)
    assert isinstance(refused, Infeasible)
    assert "fsdp=7 would fit with 7 workers and as many microbatches" in refused.reason


def test_context_parallel_ranks_are_replaced_by_shards_if_memory_is_short() -> None:
    job = Job(num_microbatches=8, state_bytes=120, margin=1.0)
    assert layout_of("cp=2,fsdp=2", 4, job=job, memory_bytes=60) == "fsdp=2,cp=2"
    assert layout_of("cp=2,fsdp=2", 4, job=job, memory_bytes=59) == "fsdp=4"


def test_refusal_for_memory_names_needed_and_available_bytes_and_what_fits() -> None:
    job = Job(num_microbatches=8, state_bytes=100, param_bytes=40, margin=1.5)
    refused = choose("tp=2,fsdp=1", 2, job, 45)
    assert refused == Infeasible(
        "tp=2: a worker needs 70 bytes for its part, times a margin of 1.5, but has 45; raise "
        "fsdp: fsdp=3 would fit with 6 workers; fsdp=2: a worker needs 70 bytes for its part, "
        "times a margin of 1.5, but has 45; raise fsdp: fsdp=5 would fit with 5 workers"
    )
    smaller = choose("tp=2,dp=2", 1, job, 80)
    assert isinstance(smaller, Infeasible)
    assert smaller.reason.startswith(
        "dp=2,tp=2 needs 4 workers, only 1 available; dp=1: a worker needs"
    )
    assert layout_of("tp=2,fsdp=1", 6, job=job, memory_bytes=45) == "fsdp=3,tp=2"


def test_predicted_activations_count_but_refuse_nothing_that_may_fit() -> None:
    """Of 100 bytes of state 40 are parameters; a worker has 150 to 400 bytes."""
    facts = MemoryFacts(passes=(PassMemory(blocks_bytes=200, last_bytes=10),))
    job = Job(8, state_bytes=100, param_bytes=40, margin=1.0)
    predicted = replace(job, memory=facts)
    assert layout_of("", 2, job=job, memory_bytes=320) == "dp=2"
    assert layout_of("", 2, job=predicted, memory_bytes=400) == "dp=2"
    assert layout_of("", 2, job=predicted, memory_bytes=290) == "fsdp=2"
    assert layout_of("", 2, job=predicted, memory_bytes=200) == "dp=2", "none fits by prediction"
    assert layout_of("dp=2", 2, job=predicted, memory_bytes=290) == "dp=2", "it was requested"
    measured = replace(predicted, most_bytes=300)
    assert layout_of("dp=2", 2, job=measured, memory_bytes=400) == "fsdp=2"
    assert isinstance(choose("", 2, replace(measured, most_bytes=200), 400), Infeasible)


@pytest.mark.parametrize(
    ("zero", "num_bytes"), [(0, 160), (1, 40 + 40 + 20), (2, 40 + 30), (3, 40)]
)
def test_worker_bytes_of_each_zero_stage(zero: int, num_bytes: int) -> None:
    job = Job(state_bytes=120, param_bytes=40)
    assert worker_bytes(job, Layout(fsdp=4, zero=zero)) == num_bytes
    assert worker_bytes(job, Layout(fsdp=4, zero=zero, tp=4, cp=2)) == -(-num_bytes // 4)


@pytest.mark.parametrize(("zero", "equivalent_zero"), [(0, 0), (1, 1), (2, 2), (3, 1)])
def test_pipeline_keeps_the_parameters_that_zero_stage_3_gathers(
    zero: int, equivalent_zero: int
) -> None:
    job = Job(state_bytes=120, param_bytes=40)
    alone = worker_bytes(job, Layout(fsdp=4, zero=equivalent_zero))
    assert worker_bytes(job, Layout(pp=2, fsdp=4, zero=zero)) == -(-alone // 2)


@pytest.mark.parametrize(
    ("layout", "num_bytes"),
    [
        ("fsdp=4", 160 // 4 + 16 // 4),
        ("fsdp=4,zero=0", 160 + 16),
        ("fsdp=4,ep=4,zero=0", 160 / 4 + 16),
        ("tp=4,zero=0", 160 + 16 / 4),
        ("fsdp=2,tp=2,ep=2,zero=0", 160 / 2 + 16 / 2),
        ("fsdp=2,tp=2,ep=2", 160 / 4 + 16 / 4),
        ("pp=2,fsdp=2,ep=2,zero=0", 160 / 4 + 16 / 2),
    ],
)
def test_experts_are_sharded_by_ep_and_never_by_tp(layout: str, num_bytes: float) -> None:
    job = Job(state_bytes=132, param_bytes=44, expert_state_bytes=120, expert_param_bytes=40)
    assert worker_bytes(job, Layout.parse(layout)) == num_bytes


def test_least_fitting_fsdp_is_a_multiple_of_ep() -> None:
    job = Job(state_bytes=100, margin=1.0)
    assert least_fitting(job, TargetLayout(), Capacity(8, 34)) == 3
    assert least_fitting(job, TargetLayout(ep=4), Capacity(8, 34)) == 4
    assert least_fitting(job, TargetLayout(zero=0), Capacity(8, 34)) is None


def test_reason_names_the_refused_and_the_chosen_layout() -> None:
    choice = choose("tp=2,dp=2", 3)
    assert isinstance(choice, LayoutChoice)
    assert choice.reason == (
        "tp=2 at 4 microbatches a step, best of 1 for 3 workers; "
        "dp=2,tp=2 needs 4 workers, only 3 available"
    )
    choice = choose("dp=2,fsdp=2", 3)
    assert isinstance(choice, LayoutChoice)
    assert choice.reason == (
        "dp=3 at 3 microbatches a step, best of 1 for 3 workers; "
        "dp=2,fsdp=2 needs 4 workers, only 3 available"
    )
    assert choice.refusals == (
        "dp=2,fsdp=2 needs 4 workers, only 3 available",
        "2 layouts of one replica: a single loss would cost steps",
    )


def test_only_the_first_of_many_refusals_are_listed_and_the_others_counted() -> None:
    choice = choose("pp=4,cp=4,tp=4,dp=1", 8)
    assert isinstance(choice, LayoutChoice)
    assert len(choice.refusals) == 9
    assert choice.refusals[-1].startswith("and ")


def test_share_of_the_costliest_rank() -> None:
    assert costliest_share((), 4, 1) == 0.25
    assert costliest_share((1, 1, 1), 2, 1) == 2 / 3
    assert costliest_share((1, 1, 1, 1, 2, 2), 2, 1) == 0.5
    # Stages of 1, 1, 1 and 3: rank 1 holds the second and the last.
    assert costliest_share((1, 1, 1, 3), 2, 2) == 4 / 6


@pytest.mark.parametrize(
    ("layout", "cost"),
    [
        ("dp=2", 4.0),
        ("fsdp=2,cp=2,tp=2", 1.0),
        ("pp=2", (8 + 1) / 2),
        ("pp=2,vp=2", (8 + 1 / 2) / 2),
        ("pp=4,dp=2", (4 + 3) / 4),
        ("pp=4,dp=4", (4 + 3) / 4),
        ("pp=2,vp=2,dp=3", (4 + 1 / 2) / 2),
    ],
)
def test_step_cost_of_compute_and_pipeline_bubble(layout: str, cost: float) -> None:
    assert cost_of(layout, JOB) == pytest.approx(cost)


def test_step_cost_includes_traffic_if_bandwidths_are_known() -> None:
    """In units of 1 s: A = 2 bytes, P = 100 bytes, 6 layers; within a node 10 B/s, beyond 1 B/s."""
    job = Job(
        num_microbatches=8,
        state_bytes=300,
        param_bytes=100,
        layer_costs=(1,) * 6,
        activation_bytes=2,
        microbatch_s=1.0,
        bandwidths=Bandwidths(node=10.0, far=1.0),
    )
    assert cost_of("dp=2", job) == 4 + 100 / 10
    assert cost_of("dp=4", job) == 2 + 150 / 1
    assert cost_of("fsdp=2", job) == 4 + 3 * 4 * 50 / 10
    assert cost_of("fsdp=2,zero=2", job) == 4 + (4 * 50 + 50) / 10
    assert cost_of("fsdp=2,zero=1", job) == 4 + 100 / 10
    assert cost_of("tp=2", job) == pytest.approx(4 + 8 * 4 * 6 * 2 / 10)
    gradients = 100 / 10
    assert cost_of("cp=2", job) == pytest.approx(4 + 8 * 6 * 6 * 1 / 10 + gradients)
    alone, slower = cost_of("pp=2", job), cost_of("pp=2", replace(job, activation_bytes=4))
    assert alone > 4.5 + 2 * 2 / 10, "the first message and the last delay the step"
    assert 4.5 < alone < slower < 4.5 + 8 * 2 * 4 / 10, "others arrive while the rank computes"
    sharded = cost_of("pp=2,fsdp=2", job) - cost_of("pp=2,fsdp=2,zero=1", job)
    assert sharded == 0, "gathered and reduced once per step"
    assert cost_of("dp=2,tp=2", job) == pytest.approx(2 + 4 * 4 * 6 * 2 / 10 + 50 / 1)
    unknown = Job(num_microbatches=8, param_bytes=100, bandwidths=job.bandwidths)
    assert cost_of("dp=4", unknown) == 2


def test_slow_links_between_nodes_make_a_pipeline_the_cheapest() -> None:
    """Two nodes of two workers: a pipeline over the nodes is cheaper than replicas that reduce all
    gradients between them."""
    base = {"num_microbatches": 64, "state_bytes": 3000, "param_bytes": 1000}
    near = Job(**base, microbatch_s=1.0, bandwidths=Bandwidths(node=1e6, far=1e6))  # type: ignore[arg-type]
    slow = Job(**base, microbatch_s=1.0, bandwidths=Bandwidths(node=1e6, far=10.0))  # type: ignore[arg-type]
    capacity = Capacity(4, node_size=2, rack_size=2)
    layouts = {}
    for name, job in (("near", near), ("slow", slow)):
        choice = plan_layout(None, capacity, TargetLayout(pp=8), job, snapshots_cover=True)
        assert isinstance(choice, LayoutChoice)
        layouts[name] = str(choice.layout)
    assert layouts == {"near": "dp=4", "slow": "pp=2,dp=2"}


def cost_of(layout: str, job: Job) -> float:
    target_layout = TargetLayout.parse(layout)
    dp, fsdp = target_layout.data_axes or (1, 1)
    return step_cost(target_layout, job, Capacity(8, node_size=2, rack_size=2))(dp, fsdp)


def test_chosen_layout_is_within_the_limits_and_the_number_of_workers() -> None:
    job = Job(num_microbatches=6, state_bytes=60, param_bytes=20, limits=TRANSFORMER)
    for pp, cp, tp, num_workers in product((1, 2, 3), (1, 2), (1, 2, 4), range(1, 9)):
        choice = plan_layout(
            None, Capacity(num_workers, 20), TargetLayout(pp=pp, cp=cp, tp=tp), job, True
        )
        if isinstance(choice, LayoutChoice):
            assert job.limits.refusal(choice.layout) is None
            assert choice.layout.num_workers <= num_workers
