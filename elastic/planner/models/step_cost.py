"""The step-time model: seconds of a step under a layout, by what takes them.

The controller's choice of layout, `elastic plan` and the simulator all use it. It is a pure
function of what is known of the job (`Job`, `TimeFacts`) and of the workers (`Capacity`). If the
seconds of a microbatch are not known, one counts as 1, and communication as nothing.

- compute: `step_s + passes x pass_s + microbatches x microbatch_s` of the trial with the same `tp`
  and `cp`, plus what sharding adds to a pass in the trial of the same ZeRO stage. Without trials a
  microbatch takes `microbatch_s / (tp x cp)`. If workers outnumber the cores of their node, all
  compute is slower by that ratio. A rank computes at most ceil(num_microbatches / (dp x fsdp)).
- bubble: a pipeline is simulated event by event (`pipeline_schedule`), with its messages. The
  busiest rank waits for `(pp - 1) / vp` microbatches; further waits count as pp.
- tp and cp: their collectives are between the operations of a pass, which wait for them. They are
  those that the trial has seen; without it 4 all-reduces of the hidden state for each layer and
  pass (Shoeybi et al., Megatron-LM, 2019), and 6 (cp - 1) messages of it (Liu et al., Ring
  Attention, 2023).
- fsdp, stage 3: each block is gathered while the one before computes, in forward and in backward,
  and reduced while the next one computes (FSDP2). The first gather and the last reduction are not
  hidden. Stages 1 and 2 gather all buckets before the first pass; stage 1 reduces buckets in the
  last backward, stage 2 in each.
- dp: replicas reduce whole gradients bucket by bucket in the last backward, and the last bucket is
  not hidden; shards are reduced after it.
- hidden: communication beside compute still takes `interference` of the shorter of both, as on a
  CPU, whose cores also copy and add up what Gloo moves.
- vote: a small all-reduce of all workers. optimizer: the bytes of a worker's state, moved once.
- the sum is corrected by what the run has measured under the layout (`measured_steps`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, lru_cache
from typing import NamedTuple

from elastic.geometry.layout import Layout
from elastic.geometry.pipeline_stages import deal_layers
from elastic.geometry.target_layout import TargetLayout
from elastic.geometry.training_job import Capacity, Job, StepTrial, Traffic
from elastic.geometry.zero import zero_in_step
from elastic.planner.models.collective_times import Links, contention, overlapped
from elastic.planner.models.pipeline_schedule import SEVERAL_STAGES, Pipeline, pipeline_seconds
from elastic.planner.models.worker_memory import LEAST_BUCKET_BYTES, pass_memory, worker_memory

StepCost = Callable[[int, int], float]
"""The cost of a step as a function of (dp, fsdp)."""

MERGED_SHARE = 3
"""A merged pass keeps at most this part of the free memory, as `PassSize` does."""
VOTE_BYTES = 256
FORWARD_SHARE = 1 / 3


class StepParts(NamedTuple):
    """The seconds of a step by what takes them: `compute` and the pipeline's `bubble`, what is not
    hidden of the communication along each axis, the `vote` on the step, operations that the `host`
    issues too slowly, and the `optimizer`."""

    compute: float = 0.0
    bubble: float = 0.0
    tp: float = 0.0
    cp: float = 0.0
    pp: float = 0.0
    fsdp: float = 0.0
    dp: float = 0.0
    vote: float = 0.0
    host: float = 0.0
    optimizer: float = 0.0


def step_cost(axes: TargetLayout, job: Job, capacity: Capacity) -> StepCost:
    """The cost of layouts with these model axes; see the docstring of this module."""
    parts, corrections = step_parts(axes, job, capacity), job.times.corrections

    def cost(dp: int, fsdp: int) -> float:
        factor = corrections.of(axes.layout(dp, fsdp)) if corrections.by_layout else 1.0
        return factor * sum(parts(dp, fsdp))

    return cost


def step_parts(axes: TargetLayout, job: Job, capacity: Capacity) -> Callable[[int, int], StepParts]:
    """The parts of `step_cost`, as a function of (dp, fsdp)."""
    trial, knows_bandwidths = _trial_of(axes, job), job.knows_bandwidths

    def parts(dp: int, fsdp: int) -> StepParts:
        return _Step(axes, job, capacity, trial, dp, fsdp).parts(knows_bandwidths)

    return parts


def cost_of(layout: Layout, job: Job, capacity: Capacity) -> float:
    """The cost of a step under a layout."""
    axes = TargetLayout(layout.pp, layout.cp, layout.tp, layout.ep, layout.zero, layout.vp)
    return step_cost(axes, job, capacity)(layout.dp, layout.fsdp)


@lru_cache(maxsize=4096)
def costliest_share(layer_costs: tuple[int, ...], pp: int, vp: int) -> float:
    """The costliest pipeline rank's share of all layer costs."""
    stages = _stage_shares(layer_costs, pp * vp)
    return max(sum(stages[rank::pp]) for rank in range(pp))


@lru_cache(maxsize=4096)
def _stage_shares(layer_costs: tuple[int, ...], num_stages: int) -> tuple[float, ...]:
    """Each stage's share of all layer costs."""
    if not any(layer_costs):
        return (1 / num_stages,) * num_stages
    total = sum(layer_costs)
    return tuple(
        sum(layer_costs[layers.start : layers.stop]) / total
        for layers in deal_layers(layer_costs, num_stages)
    )


class _StepPasses(NamedTuple):
    """The passes of the busiest data rank in a step, and the microbatches in each."""

    num_passes: int
    merged: float
    pass_s: float
    """Seconds of one of them, without any wait."""
    step_s: float
    """What a step computes besides its passes."""


def _trial_of(axes: TargetLayout, job: Job) -> StepTrial | None:
    """The trial with these model axes; else None."""
    shape = (axes.tp, axes.cp, 0)
    return next((t for t in job.times.trials if (t.tp, t.cp, t.zero) == shape), None)


class _Step:
    """The times of a step under one layout."""

    def __init__(
        self,
        axes: TargetLayout,
        job: Job,
        capacity: Capacity,
        trial: StepTrial | None,
        dp: int,
        fsdp: int,
    ) -> None:
        self.axes, self.job, self.capacity, self.trial = axes, job, capacity, trial
        self.dp, self.fsdp = dp, fsdp
        self.unit = job.microbatch_s or 1.0
        self.machine = job.times.machine
        self.num_workers = axes.pp * dp * fsdp * axes.cp * axes.tp
        self.slowdown = contention(self.machine, capacity.node_size, self.num_workers)
        self.zero = zero_in_step(axes.zero, axes.pp) if fsdp > 1 else 0
        self.passes = self._passes()

    @cached_property
    def links(self) -> Links:
        return Links.of(self.machine, self.job.bandwidths, self.capacity, self.num_workers)

    def parts(self, knows_bandwidths: bool) -> StepParts:
        one, axes = self.passes, self.axes
        if axes.pp > 1:
            compute, bubble, messages = self._pipeline()
        else:
            compute, bubble, messages = one.num_passes * one.pass_s * self.slowdown, 0.0, 0.0
        compute += one.step_s * self.slowdown
        if not knows_bandwidths:
            return StepParts(compute, bubble, host=self._host_s(compute))
        span = axes.tp * axes.cp
        axis_s = one.num_passes / axes.pp
        tp = axis_s * self._traffic_s("tp", axes.tp, axes.tp)
        cp = axis_s * self._traffic_s("cp", axes.cp, span)
        vote = self.links.seconds("all_reduce", self.num_workers, VOTE_BYTES, self.num_workers)
        return StepParts(
            compute,
            bubble,
            tp,
            cp,
            messages,
            self._fsdp_s(),
            self._dp_s(),
            vote if self.machine.collectives or self.machine.latency_s else 0.0,
            self._host_s(compute),
            self._optimizer_s(),
        )

    def _passes(self) -> _StepPasses:
        job, axes, facts = self.job, self.axes, self.job.memory
        rounds = -(-job.num_microbatches // (self.dp * self.fsdp))
        merged: float = 1
        if axes.pp > 1:
            rounds = max(rounds, 1 if facts.schedule == "gpipe" else axes.pp)
            if axes.vp > 1 or facts.schedule in SEVERAL_STAGES:
                rounds = -(-rounds // axes.pp) * axes.pp
        elif facts.merges and job.times.merges:
            most = min(rounds, self._most_merged(rounds)) if rounds > 1 else 1
            num_passes = -(-rounds // max(1, most))
            rounds, merged = num_passes, rounds / num_passes
        trial = self.trial
        if trial is None:
            return _StepPasses(rounds, merged, merged * self.unit / (axes.tp * axes.cp), 0.0)
        plain = job.times.plain
        scale = self.unit / plain.single_s if plain and plain.single_s else 1.0
        pass_s = trial.pass_s + merged * trial.microbatch_s
        step_s = trial.step_s
        sharded = next((t for t in job.times.trials if t.zero and t.zero == self.zero), None)
        if plain is not None and sharded is not None:
            pass_s += max(0.0, sharded.pass_s - plain.pass_s)
            step_s += sharded.step_s - plain.step_s
        return _StepPasses(rounds, merged, scale * max(0.0, pass_s), scale * max(0.0, step_s))

    def _most_merged(self, rounds: int) -> int:
        """The microbatches that fit in a pass."""
        if self.capacity.memory_bytes is None or not self.job.memory.passes:
            return rounds
        memory = worker_memory(self.job, self.axes.layout(self.dp, self.fsdp))
        free = (self.capacity.memory_bytes - memory.state) / MERGED_SHARE
        return int(free / max(1, memory.activations))

    def _pipeline(self) -> tuple[float, float, float]:
        """The seconds of a pipeline: of its busiest rank, and those in which that waits.

        Waits beyond the usual bubble are for messages."""
        axes, one = self.axes, self.passes
        num_stages = axes.pp * axes.vp
        forward_s, backward_s = [], []
        for stage, share in enumerate(_stage_shares(self.job.layer_costs, num_stages)):
            parts = self._stage_parts(stage, share)
            forward_s.append(parts[0] * one.pass_s)
            backward_s.append(parts[1] * one.pass_s)
        per_rank = [sum((forward_s + backward_s)[rank :: axes.pp]) for rank in range(axes.pp)]
        crowd = min(self.num_workers, self.links.node_size) / axes.pp
        message_s = 0.0
        if self.job.knows_bandwidths:
            hidden = self.job.activation_bytes / (axes.cp * axes.tp)
            message_s = self.links.seconds("shift", 2, hidden, self.num_workers)
        pipeline = Pipeline(
            self.job.memory.schedule if axes.vp == 1 else SEVERAL_STAGES[0],
            axes.pp,
            tuple(forward_s),
            tuple(backward_s),
            message_s,
            max(1.0, crowd),
            self.machine.cores,
        )
        whole_s = pipeline_seconds(pipeline, one.num_passes)
        busy_s = one.num_passes * max(per_rank) * self.slowdown
        waits_s = whole_s - busy_s
        bubble_s = waits_s
        if message_s:
            bubble_s = min(waits_s, (axes.pp - 1) / axes.vp * max(per_rank))
        return busy_s, bubble_s, waits_s - bubble_s

    def _stage_parts(self, stage: int, share: float) -> tuple[float, float]:
        """The forward and the backward of a stage, as shares of a whole pass."""
        facts, job = self.job.times, self.job
        num_outer = len(job.layer_costs) - job.memory.num_blocks
        if not facts.trials or not job.memory.num_blocks or num_outer not in (0, 2):
            return FORWARD_SHARE * share, (1 - FORWARD_SHARE) * share
        layers = deal_layers(job.layer_costs, self.axes.pp * self.axes.vp)[stage]
        begin, end = (1, len(job.layer_costs) - 1) if num_outer else (0, len(job.layer_costs))
        blocks = sum(begin <= layer < end for layer in layers) / job.memory.num_blocks
        forward, backward = (blocks * part for part in facts.shares.blocks)
        if stage == 0:
            forward, backward = forward + facts.shares.first[0], backward + facts.shares.first[1]
        if stage == self.axes.pp * self.axes.vp - 1:
            forward, backward = forward + facts.shares.last[0], backward + facts.shares.last[1]
        return forward, backward

    def _traffic_s(self, axis: str, num_ranks: int, span: int) -> float:
        """The collectives of a model axis in one pass through all layers."""
        if num_ranks == 1:
            return 0.0
        trial, merged = self.trial, self.passes.merged
        traffic = trial.traffic if trial is not None else ()
        if not traffic:
            hidden = self.job.activation_bytes / self.axes.cp
            layers = self.job.num_layers or 1
            kind, count = ("all_reduce", 4) if axis == "tp" else ("shift", 6 * (num_ranks - 1))
            traffic = (Traffic(kind, count * layers, 0, count * layers * hidden),)
        elif axis == "cp" and self.axes.tp > 1:
            return 0.0  # the trial had both axes and counts as tp
        return sum(
            self.links.seconds(
                t.kind, num_ranks, t.fixed_bytes + merged * t.microbatch_bytes, span, t.count
            )
            for t in traffic
        )

    def _bytes(self) -> tuple[float, float, int]:
        """Gathered and reduced bytes of a worker's whole parameters, and its number of blocks."""
        job, axes = self.job, self.axes
        share = costliest_share(job.layer_costs, axes.pp, axes.vp) / axes.tp
        copied = job.memory.copy_bytes or job.param_bytes
        trained = job.memory.gradient_bytes or job.param_bytes
        blocks = job.memory.num_blocks or job.num_layers or 1
        return copied * share, trained * share, max(1, -(-blocks // axes.pp))

    def _fsdp_s(self) -> float:
        """What is not hidden of the traffic of shards."""
        if self.fsdp == 1 or self.zero == 0:
            return 0.0  # without shards all ranks are replicas; see `_dp_s`
        copied, trained, blocks = self._bytes()
        span = self.axes.tp * self.axes.cp * self.fsdp
        one = self.passes

        def seconds(kind: str, num_bytes: float, count: float) -> float:
            return self.links.seconds(kind, self.fsdp, num_bytes, span, count)

        gather_s = seconds("all_gather", copied, blocks)
        scatter_s = seconds("reduce_scatter", trained, blocks)
        if self.zero == 3:
            return self._gathered_blocks_s(gather_s, scatter_s, blocks)
        buckets = self._num_buckets(copied, blocks)
        gathered_s = seconds("all_gather", copied, buckets)
        if self.zero == 2:
            return gathered_s + one.num_passes * self._beside(self.backward_s, scatter_s, blocks)
        return gathered_s + self._reduced_beside_backward(
            "reduce_scatter", self.fsdp, trained, span
        )

    def _gathered_blocks_s(self, gather_s: float, scatter_s: float, blocks: int) -> float:
        """Stage 3: what passes wait for blocks, which arrive and leave beside compute.

        Without `sums_whole` each backward reduces gradients; if blocks stay gathered, only the
        first pass gathers them.
        """
        facts, num_passes = self.job.memory, self.passes.num_passes
        num_gathering = 1 if facts.keeps_gathered else num_passes
        num_reducing = 1 if facts.sums_whole else num_passes
        again_s = 0.0 if facts.keeps_gathered else gather_s
        forward_s = self._beside(self.forward_s, gather_s, blocks)
        backward_s = self._beside(self.backward_s, again_s, blocks)
        reducing_s = self._beside(self.backward_s, again_s + scatter_s, blocks)
        return (
            num_gathering * forward_s
            + (num_passes - num_reducing) * backward_s
            + num_reducing * reducing_s
        )

    @property
    def forward_s(self) -> float:
        return FORWARD_SHARE * self._own_pass_s

    @property
    def backward_s(self) -> float:
        return (1 - FORWARD_SHARE) * self._own_pass_s

    @property
    def _own_pass_s(self) -> float:
        """A pass through the layers of one pipeline rank."""
        share = costliest_share(self.job.layer_costs, self.axes.pp, self.axes.vp)
        return share * self.passes.pass_s * self.slowdown

    def _dp_s(self) -> float:
        """What is not hidden of the reduction over replicas; those of `cp` count as well."""
        replicas = self.dp * self.axes.cp * (self.fsdp if self.zero == 0 else 1)
        if replicas == 1:
            return 0.0
        _, trained, blocks = self._bytes()
        span = self.num_workers // self.axes.pp
        if self.zero:
            shard = trained / self.fsdp
            count = blocks if self.zero > 1 else self._num_buckets(trained, blocks)
            return self.links.seconds("all_reduce", replicas, shard, span, count)
        return self._reduced_beside_backward("all_reduce", replicas, trained, span)

    def _reduced_beside_backward(
        self, kind: str, num_ranks: int, num_bytes: float, span: int
    ) -> float:
        """Buckets that are reduced in the last backward."""
        buckets = self._num_buckets(num_bytes, self._bytes()[2])
        reduced_s = self.links.seconds(kind, num_ranks, num_bytes, span, buckets)
        return self._beside(self.backward_s, reduced_s, buckets)

    def _num_buckets(self, num_bytes: float, blocks: int) -> int:
        """Small blocks are merged in a bucket."""
        return max(1, min(blocks, round(num_bytes / LEAST_BUCKET_BYTES)))

    def _beside(self, compute_s: float, communication_s: float, num_parts: int) -> float:
        """What communication adds to compute, if all parts but one run beside it."""
        alone = communication_s / num_parts
        beside_s = compute_s * (num_parts - 1) / num_parts
        rest_s = communication_s - alone
        both = overlapped(beside_s, rest_s, self.machine.interference)
        return alone + both - beside_s

    def _host_s(self, compute_s: float) -> float:
        """What the host needs beyond the device to issue all operations."""
        facts = self.job.memory
        if not self.machine.issue_s or not facts.passes:
            return 0.0
        num_operations = pass_memory(facts.passes, self.axes.tp).num_operations / self.axes.pp
        issued_s = self.passes.num_passes * num_operations * self.machine.issue_s
        return max(0.0, issued_s - compute_s)

    def _optimizer_s(self) -> float:
        if not self.machine.memory_bytes_per_s or self.passes.step_s:
            return 0.0  # a trial has the optimizer's step
        memory = worker_memory(self.job, self.axes.layout(self.dp, self.fsdp))
        moved = 2 * (memory.parameters + memory.optimizer) + memory.gradients
        return moved / self.machine.memory_bytes_per_s
