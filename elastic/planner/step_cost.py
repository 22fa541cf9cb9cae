"""Step cost under a layout, in units of one microbatch's compute on one worker.

    step = (rounds + (pp - 1) / vp) x share / (tp x cp) + traffic

- rounds: the most microbatches that a data rank computes, ceil(num_microbatches / (dp x fsdp)),
  padded to what the schedule needs: 1F1B at least `pp`, interleaved 1F1B a multiple of `pp`.
- share: the costliest pipeline rank's share of all layer costs (see `pipeline_stages`), or
  1 / pp if the costs are not known.
- (pp - 1) / vp: the bubble of 1F1B and of its interleaved form (Narayanan et al., Efficient
  Large-Scale Language Model Training, 2021, section 2.2).
- traffic: for each axis, the bytes that a worker sends divided by the slowest bandwidth in its
  groups, in microbatches; 0 if a bandwidth or `microbatch_s` is not known. The model assumes no
  overlap with compute. Of n workers, each sends 2 (n - 1) / n of the bytes in an all-reduce, and
  half of that in an all-gather or reduce-scatter.

| axis | bytes a worker sends, with A = activation_bytes / cp and P = param_bytes x share / tp |
|---|---|
| tp | 4 all-reduces of A for each layer and round (Shoeybi et al., Megatron-LM, 2019) |
| cp | 6 (cp - 1) A for each layer and round: keys and values in the forward, keys and values with their gradients in the backward (Liu et al., Ring Attention, 2023) |
| pp | 2 vp A for each round |
| fsdp | zero=3: two all-gathers and a reduce-scatter of P each round; zero=2: a reduce-scatter each round and an all-gather each step; zero below 2, and zero=3 in a pipeline: an all-reduce each step (Rajbhandari et al., ZeRO, 2020, section 7) |
| dp | an all-reduce of P / fsdp each step |
| ep | not known: it depends on where tokens are routed |
"""  # noqa: E501 (a table)

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from elastic.geometry.layout import Layout
from elastic.geometry.pipeline_stages import deal_layers
from elastic.geometry.target_layout import TargetLayout
from elastic.geometry.training_job import Capacity, Job
from elastic.geometry.zero import zero_in_step

StepCost = Callable[[int, int], float]
"""The cost of a step as a function of (dp, fsdp)."""


class StepParts(NamedTuple):
    """The cost of a step by what takes it, in microbatches: `compute` and the pipeline's `bubble`,
    and the communication along each axis."""

    compute: float = 0.0
    bubble: float = 0.0
    tp: float = 0.0
    cp: float = 0.0
    pp: float = 0.0
    fsdp: float = 0.0
    dp: float = 0.0


def step_cost(axes: TargetLayout, job: Job, capacity: Capacity) -> StepCost:
    """The cost of layouts with these model axes; see the docstring of this module."""
    parts = step_parts(axes, job, capacity)
    return lambda dp, fsdp: sum(parts(dp, fsdp))


def step_parts(axes: TargetLayout, job: Job, capacity: Capacity) -> Callable[[int, int], StepParts]:
    """The parts of `step_cost`, as a function of (dp, fsdp)."""
    microbatch = costliest_share(job.layer_costs, axes.pp, axes.vp) / (axes.tp * axes.cp)
    bubble = (axes.pp - 1) / axes.vp * microbatch
    traffic = _traffic(axes, job, capacity) if job.knows_bandwidths else None

    def parts(dp: int, fsdp: int) -> StepParts:
        compute = _num_rounds(axes, job, dp * fsdp) * microbatch
        return StepParts(compute, bubble, *(traffic(dp, fsdp) if traffic else ()))

    return parts


def cost_of(layout: Layout, job: Job, capacity: Capacity) -> float:
    """The cost of a step under a layout, in microbatches."""
    axes = TargetLayout(layout.pp, layout.cp, layout.tp, layout.ep, layout.zero, layout.vp)
    return step_cost(axes, job, capacity)(layout.dp, layout.fsdp)


def costliest_share(layer_costs: tuple[int, ...], pp: int, vp: int) -> float:
    """The costliest pipeline rank's share of all layer costs."""
    if not any(layer_costs):
        return 1 / pp
    stages = [
        sum(layer_costs[layers.start : layers.stop]) for layers in deal_layers(layer_costs, pp * vp)
    ]
    return max(sum(stages[rank::pp]) for rank in range(pp)) / sum(stages)


def _num_rounds(axes: TargetLayout, job: Job, num_data_ranks: int) -> int:
    """The microbatches of the busiest data rank, with padding."""
    rounds = -(-job.num_microbatches // num_data_ranks)
    return -(-rounds // axes.pp) * axes.pp if axes.vp > 1 else max(rounds, axes.pp)


def _traffic(
    axes: TargetLayout, job: Job, capacity: Capacity
) -> Callable[[int, int], tuple[float, float, float, float, float]]:
    """The time of a step's communication along tp, cp, pp, fsdp and dp, in microbatches."""
    share = costliest_share(job.layer_costs, axes.pp, axes.vp)
    num_layers = (job.num_layers or 1) * share
    param_bytes = job.param_bytes * share / axes.tp
    activation_bytes = job.activation_bytes / axes.cp
    cost_per_byte = _cost_per_byte(job, capacity)
    tp, cp, inner = axes.tp, axes.cp, axes.tp * axes.cp
    hidden_bytes = activation_bytes * num_layers
    tp_cost = 4 * hidden_bytes * _all_reduce_factor(tp) * cost_per_byte(tp)
    cp_cost = 6 * hidden_bytes * (cp - 1) * cost_per_byte(inner)
    copied, trained = _shares(job)
    per_round, per_step = _fsdp_all_reduces(zero_in_step(axes.zero, axes.pp), copied, trained)

    def traffic(dp: int, fsdp: int) -> tuple[float, float, float, float, float]:
        rounds = _num_rounds(axes, job, dp * fsdp)
        replica = inner * fsdp
        pp_cost = 2 * axes.vp * activation_bytes * cost_per_byte(replica * dp * axes.pp)
        num_all_reduces = rounds * per_round + per_step
        fsdp_cost = num_all_reduces * _all_reduce_factor(fsdp) * cost_per_byte(replica)
        dp_cost = trained * _all_reduce_factor(dp) / fsdp * cost_per_byte(replica * dp)
        return (
            rounds * tp_cost,
            rounds * cp_cost,
            rounds * pp_cost if axes.pp > 1 else 0.0,
            param_bytes * fsdp_cost,
            param_bytes * dp_cost,
        )

    return traffic


def _shares(job: Job) -> tuple[float, float]:
    """The bytes that are gathered, and those that are reduced, as shares of the parameters'."""
    if not job.param_bytes:
        return 1.0, 1.0
    memory = job.memory
    return (
        (memory.copy_bytes or job.param_bytes) / job.param_bytes,
        (memory.gradient_bytes or job.param_bytes) / job.param_bytes,
    )


def _fsdp_all_reduces(zero: int, copied: float, trained: float) -> tuple[float, float]:
    """The traffic of `fsdp` in all-reduces of the parameters, per round and per step."""
    by_stage = {3: (copied + trained / 2, 0.0), 2: (trained / 2, copied / 2)}
    return by_stage.get(zero, (0.0, (copied + trained) / 2 if zero else trained))


def _all_reduce_factor(num_workers: int) -> float:
    """Bytes that each worker sends in a ring all-reduce, as a multiple of the bytes reduced."""
    return 2 * (num_workers - 1) / num_workers


def _cost_per_byte(job: Job, capacity: Capacity) -> Callable[[int], float]:
    """Microbatches per byte at the slowest bandwidth among `num_ranks` consecutive world ranks."""

    def cost_per_byte(num_ranks: int) -> float:
        bandwidths = job.bandwidths
        if num_ranks <= capacity.node_size:
            bandwidth = bandwidths.node
        else:
            bandwidth = bandwidths.rack if num_ranks <= capacity.rack_size else bandwidths.far
        return 1 / (bandwidth * job.microbatch_s) if bandwidth else 0.0

    return cost_per_byte
