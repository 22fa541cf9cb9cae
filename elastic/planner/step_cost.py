"""What a step costs under a layout, in units of one microbatch's compute on one worker.

    step = (rounds + (pp - 1) / vp) x share / (tp x cp) + traffic

- rounds: the most microbatches that a data rank computes, ceil(num_microbatches / (dp x fsdp)),
  padded to what the schedule needs: 1F1B at least `pp`, interleaved whole multiples of it.
- share: of all layers' costs, what lies on the costliest pipeline rank (see `stages`), or
  1 / pp where the costs are not known.
- (pp - 1) / vp: the bubble of 1F1B and of its interleaved form (Narayanan et al., Efficient
  Large-Scale Language Model Training, 2021, section 2.2).
- traffic: for each axis the bytes that a worker sends over the speed of the slowest link in
  its groups, in microbatches; 0 where a speed or `microbatch_s` is not known. None of it is
  taken to hide behind compute. Of n workers, an all-reduce sends 2 (n - 1) / n of the bytes, a
  gather or reduce-scatter half of that.

| axis | bytes a worker sends, with A = activation_bytes / cp and P = param_bytes x share / tp |
|---|---|
| tp | 4 all-reduces of A a layer and round (Shoeybi et al., Megatron-LM, 2019) |
| cp | 6 (cp - 1) A a layer and round: keys and values forwards, and again with the gradients of both backwards (Liu et al., Ring Attention, 2023) |
| pp | 2 vp A a round |
| fsdp | zero=3: two gathers and a reduction of P a round; 2: a reduction a round and a gather a step; below, and in a pipeline also 3: an all-reduce a step (Rajbhandari et al., ZeRO, 2020, section 7) |
| dp | an all-reduce of P / fsdp a step |
| ep | not known: it depends on where tokens are routed |
"""  # noqa: E501 (a table)

from __future__ import annotations

from collections.abc import Callable

from elastic.geometry.layout import Layout
from elastic.geometry.pipeline_stages import deal_layers
from elastic.geometry.target_layout import TargetLayout
from elastic.geometry.training_job import Capacity, Job
from elastic.geometry.zero import zero_in_step

StepCost = Callable[[int, int], float]
"""What a step costs with these (dp, fsdp)."""


def step_cost(axes: TargetLayout, job: Job, capacity: Capacity) -> StepCost:
    """The cost of layouts with these model axes; see the head of this module."""
    microbatch = costliest_share(job.layer_costs, axes.pp, axes.vp) / (axes.tp * axes.cp)
    bubble = (axes.pp - 1) / axes.vp

    def compute(dp: int, fsdp: int) -> float:
        return (_num_rounds(axes, job, dp * fsdp) + bubble) * microbatch

    if not job.knows_bandwidths:
        return compute
    traffic = _traffic(axes, job, capacity)
    return lambda dp, fsdp: compute(dp, fsdp) + traffic(dp, fsdp)


def cost_of(layout: Layout, job: Job, capacity: Capacity) -> float:
    """What a step costs under a layout, in microbatches."""
    axes = TargetLayout(layout.pp, layout.cp, layout.tp, layout.ep, layout.zero, layout.vp)
    return step_cost(axes, job, capacity)(layout.dp, layout.fsdp)


def costliest_share(layer_costs: tuple[int, ...], pp: int, vp: int) -> float:
    """The part of all layers' costs that lies on the costliest pipeline rank."""
    if not any(layer_costs):
        return 1 / pp
    stages = [
        sum(layer_costs[layers.start : layers.stop]) for layers in deal_layers(layer_costs, pp * vp)
    ]
    return max(sum(stages[rank::pp]) for rank in range(pp)) / sum(stages)


def _num_rounds(axes: TargetLayout, job: Job, num_data_ranks: int) -> int:
    """Microbatches of the busiest data rank, with those that pad."""
    rounds = -(-job.num_microbatches // num_data_ranks)
    return -(-rounds // axes.pp) * axes.pp if axes.vp > 1 else max(rounds, axes.pp)


def _traffic(axes: TargetLayout, job: Job, capacity: Capacity) -> StepCost:
    """The time of all communication in a step, in microbatches."""
    share = costliest_share(job.layer_costs, axes.pp, axes.vp)
    num_layers = (job.num_layers or 1) * share
    param_bytes = job.param_bytes * share / axes.tp
    activation_bytes = job.activation_bytes / axes.cp
    slowness = _slowness(job, capacity)
    tp, cp, inner = axes.tp, axes.cp, axes.tp * axes.cp
    round_cost = activation_bytes * (
        4 * num_layers * _all_reduced(tp) * slowness(tp)
        + 6 * num_layers * (cp - 1) * slowness(inner)
    )
    each_round, each_step = _sharing(zero_in_step(axes.zero, axes.pp))

    def traffic(dp: int, fsdp: int) -> float:
        rounds = _num_rounds(axes, job, dp * fsdp)
        replica = inner * fsdp
        passed = 2 * axes.vp * activation_bytes * slowness(replica * dp * axes.pp)
        sharded = (rounds * each_round + each_step) * _all_reduced(fsdp) * slowness(replica)
        copied = _all_reduced(dp) / fsdp * slowness(replica * dp)
        passing = passed if axes.pp > 1 else 0.0
        return rounds * (round_cost + passing) + param_bytes * (sharded + copied)

    return traffic


def _sharing(zero: int) -> tuple[float, float]:
    """How many all-reduces' worth `fsdp` sends of the parameters, a round and a step."""
    return {3: (1.5, 0.0), 2: (0.5, 0.5)}.get(zero, (0.0, 1.0))


def _all_reduced(num_workers: int) -> float:
    """What each of so many workers sends in an all-reduce by ring, as a multiple of its bytes."""
    return 2 * (num_workers - 1) / num_workers


def _slowness(job: Job, capacity: Capacity) -> Callable[[int], float]:
    """Microbatches a byte, over the slowest link among so many consecutive world ranks."""

    def slowness(num_ranks: int) -> float:
        bandwidths = job.bandwidths
        if num_ranks <= capacity.node_size:
            speed = bandwidths.node
        else:
            speed = bandwidths.rack if num_ranks <= capacity.rack_size else bandwidths.far
        return 1 / (speed * job.microbatch_s) if speed else 0.0

    return slowness
