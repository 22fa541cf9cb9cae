"""The ranking of layouts on a device: what fits, what is fast, and one reason for each."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastic.geometry.layout import Layout
from elastic.geometry.model_limits import Limits
from elastic.geometry.target_layout import TargetLayout
from elastic.geometry.training_job import Capacity, Job, MemoryFacts, PassMemory
from elastic.planner.devices import named_device
from elastic.planner.layout_choice import LayoutChoice, plan_layout
from elastic.planner.layout_ranking import Workplace, rank_layouts
from elastic.planner.models.worker_memory import worker_memory

NUM_PARAMS = 7_000_000_000
BLOCKS = 32
TRIAL = PassMemory(1, 20 * 10**9, 10**9, 10**9, 5 * 10**8, 3 * 10**9, 4000)
SEVEN = Job(
    num_microbatches=256,
    microbatch=1,
    state_bytes=12 * NUM_PARAMS,
    param_bytes=4 * NUM_PARAMS,
    margin=1.08,
    steps=1000,
    limits=Limits(tp_divides=8, num_layers=BLOCKS, seq_len=4096),
    layer_costs=(1,) * BLOCKS,
    activation_bytes=2 * 4096 * 4096,
    memory=MemoryFacts(
        copy_bytes=2 * NUM_PARAMS,
        block_bytes=4 * NUM_PARAMS // BLOCKS,
        passes=(TRIAL,),
        layers=((4 * NUM_PARAMS // BLOCKS, 0),) * BLOCKS,
        num_blocks=BLOCKS,
    ),
)
"""7 B parameters, bfloat16 with float32 state and gradients, 4096 tokens."""
H100 = named_device("H100-80GB")
assert H100 is not None
WORKPLACE = Workplace(H100, 989e12, 6 * NUM_PARAMS * 4096 * 256, price=2.5)


def test_seven_billion_parameters_on_eight_gpus_are_sharded() -> None:
    assert worker_memory(SEVEN, Layout(dp=8)).total > 126e9
    choice = plan_layout(None, Capacity(8, 80 * 10**9), TargetLayout(), SEVEN, True)
    assert isinstance(choice, LayoutChoice) and choice.layout.fsdp > 1
    ranking = rank_layouts(SEVEN, WORKPLACE, 8)
    assert ranking.best is not None and ranking.best.layout != Layout(dp=8)
    [replicas] = [e for e in ranking.estimates if e.layout == Layout(dp=8)]
    assert not replicas.is_fitting and "optimizer" in replicas.reason


def test_last_stage_also_has_the_weight_of_a_tied_head() -> None:
    tied = replace(SEVEN, memory=replace(SEVEN.memory, tied=(0, 4 * 10**11)))
    layout = Layout(pp=8, fsdp=4)
    more = worker_memory(tied, layout).total - worker_memory(SEVEN, layout).total
    assert more > 10**11
    assert worker_memory(tied, Layout(dp=8)) == worker_memory(SEVEN, Layout(dp=8))


def test_fitting_layouts_come_first_and_by_seconds() -> None:
    ranking = rank_layouts(SEVEN, WORKPLACE, 64)
    fitting = [estimate for estimate in ranking.estimates if estimate.is_fitting]
    assert list(ranking.estimates[: len(fitting)]) == fitting
    assert [e.step_s for e in fitting] == sorted(e.step_s for e in fitting)
    assert all(estimate.reason for estimate in ranking.estimates)
    assert all(e.memory.total * SEVEN.margin <= 80e9 for e in fitting)


def test_price_is_that_of_all_workers_until_the_last_step() -> None:
    best = rank_layouts(SEVEN, WORKPLACE, 8).best
    assert best is not None and best.cost is not None
    assert best.hours == pytest.approx(1000 * best.step_s / 3600)
    assert best.cost == pytest.approx(best.hours * 8 * 2.5)
    assert 0.2 < best.mfu <= WORKPLACE.efficiency


def test_given_layouts_alone_are_ranked_or_refused() -> None:
    layouts = [Layout(fsdp=8), Layout(tp=3), Layout(dp=16)]
    ranking = rank_layouts(SEVEN, WORKPLACE, 8, layouts)
    assert [estimate.layout for estimate in ranking.estimates] == [Layout(fsdp=8)]
    assert any("tp=3" in refusal for refusal in ranking.refusals)
    assert any("16 workers" in refusal for refusal in ranking.refusals)


def test_nothing_is_best_where_nothing_fits() -> None:
    small = replace(WORKPLACE, device=replace(H100, memory_gb=4))
    ranking = rank_layouts(SEVEN, small, 8)
    assert ranking.best is None and ranking.estimates


def test_slower_link_makes_more_communication_lose() -> None:
    slow = replace(WORKPLACE, device=replace(H100, node_gb_s=1, far_gb_s=1))
    [estimate] = rank_layouts(SEVEN, slow, 8, [Layout(fsdp=4, tp=2)]).estimates
    [before] = rank_layouts(SEVEN, WORKPLACE, 8, [Layout(fsdp=4, tp=2)]).estimates
    assert estimate.seconds["tp"] > 50 * before.seconds["tp"]
    assert estimate.seconds["compute"] == before.seconds["compute"]
    ranking = rank_layouts(SEVEN, slow, 8)
    assert ranking.best is not None and ranking.best.layout.tp == 1


def test_pipeline_rank_with_most_in_flight_counts() -> None:
    first = worker_memory(SEVEN, Layout(pp=4, dp=2))
    second = worker_memory(SEVEN, Layout(pp=2, dp=4))
    assert first.activations == pytest.approx(second.activations, rel=0.1)
    gpipe = replace(SEVEN, memory=replace(SEVEN.memory, schedule="gpipe"))
    assert worker_memory(gpipe, Layout(pp=4, dp=2)).activations > 5 * first.activations


def test_gradients_of_a_single_pass_do_not_meet_all_activations() -> None:
    single = replace(SEVEN, num_microbatches=1)
    once, often = worker_memory(single, Layout()), worker_memory(SEVEN, Layout())
    assert once.total < often.total
