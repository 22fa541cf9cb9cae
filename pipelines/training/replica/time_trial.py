"""Time trial: how long one worker computes a step of a model, without any other worker.

A replica trains in a world of which only this rank exists: its collectives do nothing and take no
time. So all that a worker does itself is measured as it is, under each way to shard a model.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from itertools import pairwise
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from actors.distributed.meshes import form_groups
from actors.distributed.torch_private import TorchDispatchMode
from actors.runtime.program import Groups
from elastic.geometry.assignment import Assignment
from elastic.geometry.layout import Layout
from elastic.geometry.shard_map import region_of
from elastic.geometry.training_job import PassShares, StepTrial, TimeFacts, Traffic
from elastic.protocol.votes import Vote
from pipelines.settings import TrainSettings
from pipelines.training.replica.replica import ShardedReplica
from pipelines.training.workload.state import initial_value, state_specs
from pipelines.training.workload.trees import tensors_in
from pipelines.training.workload.workload import Workload

TIMEOUT = timedelta(seconds=60)
NUM_PASSES = 3
"""Passes of a step that is compared with a step of one: more than two, for their difference must
exceed what a busy machine adds to either."""
MERGED = 4
"""Microbatches in the merged pass of a trial."""
NUM_STEPS = 6
NUM_MARKS = 6
"""Begin, first block, last block's end, their gradients, and the end of backward."""
NUM_FIRST = 2
"""The first steps fill caches and do not count."""
SHARDED = tuple(Layout(fsdp=2, zero=zero) for zero in (1, 2, 3))
KINDS = {
    "_allgather_base_": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "allreduce_": "all_reduce",
    "all_reduce": "all_reduce",
    "send": "shift",
}
"""Torch's operations, and what they are called in `CollectiveTimes`."""


class _FakeBackend:
    """The `GroupBackend` of a world whose collectives do nothing."""

    name = "fake"
    loses_wake_ups = can_be_left = False

    def __init__(self, device_type: str) -> None:
        self.device_type = device_type

    def prepare(self, store: dist.Store, num_ranks: int, timeout: timedelta) -> None:
        """Nothing to prepare."""

    def options(self, timeout: timedelta) -> None:
        return None

    def create(self, arguments: Any, options: Any) -> Any:
        raise AssertionError("torch creates fake groups itself")

    def abort(self) -> None:
        """Nothing ever waits."""

    def forget(self) -> None:
        """Nothing is kept."""


class _Collectives(TorchDispatchMode):
    """Counts the collectives of a step, and their bytes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()
        self.num_bytes: Counter[str] = Counter()

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = operator.name().partition("::")[2].partition(".")[0]
        if operator.namespace in ("c10d", "_c10d_functional") and name in KINDS:
            sizes = [tensor.nbytes for tensor in tensors_in((args, kwargs or {}))]
            if sizes:
                self.counts[KINDS[name]] += 1
                self.num_bytes[KINDS[name]] += max(sizes)
        return operator(*args, **(kwargs or {}))


def time_facts(
    workload: Workload,
    settings: TrainSettings,
    device: torch.device,
    model_layouts: Iterable[Layout] = (),
    slowest: Callable[[list[float]], list[float]] = list,
) -> TimeFacts:
    """The trials of a model: whole, sharded at each ZeRO stage, and cut by these model layouts.

    Other workers of the machine may do the same meanwhile, and compete with this one for its memory
    and caches as they do in training. Then `slowest` returns, of the seconds of each step, the most
    of all workers, since a step waits for the slowest. Raises what a module raises that cannot be
    cut so. The process must have no groups, and treat subnormal numbers as a worker does
    (`flush_denormals`).
    """
    trial = _TimedReplicas(workload, settings, device, slowest)
    shares = PassShares()
    trials = [trial.run(Layout(dp=2))]
    if trial.clock is not None:
        shares = trial.clock.shares()
    trials += [trial.run(layout) for layout in (*SHARDED, *model_layouts)]
    return TimeFacts(tuple(trials), shares, merges=trial.merges)


class _TimedReplicas:
    """Trains a few steps of a workload under one layout after the other."""

    def __init__(
        self,
        workload: Workload,
        settings: TrainSettings,
        device: torch.device,
        slowest: Callable[[list[float]], list[float]],
    ) -> None:
        self.workload, self.settings = workload, settings
        self.device, self.slowest = device, slowest
        self.merges = settings.may_merge
        self.clock: _PassClock | None = None
        """Of the first layout."""

    def run(self, layout: Layout) -> StepTrial:
        collectives = _Collectives()
        one_s = self._step_s(layout, 1, 1, collectives)
        more_s = self._step_s(layout, NUM_PASSES, 1)
        one_s = min(one_s, self._step_s(layout, 1, 1))  # the first also filled caches
        pass_s = max(0.0, more_s - one_s) / (NUM_PASSES - 1)
        microbatch_s = pass_s
        if self.merges:
            merged_s = self._step_s(layout, 1, MERGED)
            if self.merges:  # the trial may have found that this model does not
                microbatch_s = min(pass_s, max(0.0, (merged_s - one_s) / (MERGED - 1)))
        return StepTrial(
            layout.tp,
            layout.cp,
            layout.zero if layout.fsdp > 1 else 0,
            step_s=max(0.0, one_s - pass_s),
            pass_s=pass_s - microbatch_s,
            microbatch_s=microbatch_s,
            traffic=_traffic(layout, collectives),
        )

    def _step_s(
        self,
        layout: Layout,
        num_passes: int,
        merged: int,
        collectives: _Collectives | None = None,
    ) -> float:
        """The median seconds of a step with these passes, of these microbatches each."""
        size = self.settings.microbatch
        changes = {
            "batch": num_passes * merged * layout.num_data_ranks * size,
            "pass_samples": merged * size,
            "record_samples": None,
        }
        small = self.settings.model_copy(update=changes)
        with _alone(layout, self.device) as groups:
            replica = self._replica(small, groups)
            if collectives is not None and self.clock is None:
                self.clock = _PassClock(self.workload, replica)
            times_s = [self._step(replica, step) for step in range(1, NUM_STEPS + 1)]
            if collectives is not None:
                with collectives:
                    replica.compute(NUM_STEPS + 1, _never)
            self.merges = self.merges and replica.passes.agree_on_size() == merged
            return median(self.slowest(times_s[NUM_FIRST:]))

    def _replica(self, settings: TrainSettings, groups: Groups) -> ShardedReplica:
        replica = ShardedReplica(self.workload, settings, groups)
        values = {}
        for spec in state_specs(self.workload, settings):
            region = region_of(spec, groups.layout, groups.place)
            if region is not None:
                value = initial_value(self.workload, settings, spec, region)
                values[spec.name] = value.to(groups.device)
        replica.adopt(values)
        return replica

    def _step(self, replica: ShardedReplica, step: int) -> float:
        began = time.perf_counter()
        replica.compute(step, _never).tolist()
        replica.apply(step, Vote(1, 1.0, 1, 1.0, 1))
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter() - began


class _PassClock:
    """Notes when a pass reaches and leaves the blocks, in forward and in backward."""

    def __init__(self, workload: Workload, replica: ShardedReplica) -> None:
        [module] = replica.sharded.modules
        self.marks_s: list[float] = []
        self.passes: list[list[float]] = []
        self.ended_s = 0.0
        blocks = workload.blocks(module)
        if not blocks:
            return
        module.register_forward_pre_hook(self._begin)
        blocks[0].register_forward_pre_hook(self._enter)
        blocks[-1].register_forward_hook(self._leave)
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._accumulated)

    def shares(self) -> PassShares:
        """The medians over the passes that were seen; the usual shares if there was none."""
        whole = [marks for marks in [*self.passes, self._closed()] if len(marks) == NUM_MARKS]
        whole = whole[NUM_FIRST:]
        if not whole:
            return PassShares()
        spans = [[later - earlier for earlier, later in pairwise(marks)] for marks in whole]
        first, blocks, last, back, end = (median(column) for column in zip(*spans, strict=True))
        total = first + blocks + last + back + end
        return PassShares(
            (first / total, end / total),
            (blocks / total, back / total),
            (last / total / 3, 2 * last / total / 3),
        )

    def _closed(self) -> list[float]:
        return [*self.marks_s, self.ended_s]

    def _begin(self, module: nn.Module, inputs: Any) -> None:
        if self.marks_s:
            self.passes.append(self._closed())
        self.marks_s = [time.perf_counter()]

    def _enter(self, module: nn.Module, inputs: Any) -> None:
        self.marks_s.append(time.perf_counter())
        for tensor in tensors_in(inputs):
            if tensor.requires_grad:
                tensor.register_hook(self._mark)
                return

    def _leave(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self.marks_s.append(time.perf_counter())
        for tensor in tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(self._mark)
                return

    def _mark(self, gradient: Tensor) -> None:
        self.marks_s.append(time.perf_counter())

    def _accumulated(self, parameter: Tensor) -> None:
        self.ended_s = time.perf_counter()


def _traffic(layout: Layout, collectives: _Collectives) -> tuple[Traffic, ...]:
    """The collectives between the operations of a pass: those of `tp` are all, and of `cp` the
    messages, for gradients are reduced along it as over replicas."""
    kinds = set(KINDS.values()) if layout.tp > 1 else {"shift"} if layout.cp > 1 else set()
    return tuple(
        Traffic(kind, count, 0.0, float(collectives.num_bytes[kind]))
        for kind, count in sorted(collectives.counts.items())
        if kind in kinds
    )


@contextmanager
def _alone(layout: Layout, device: torch.device) -> Iterator[Groups]:
    """The groups of world rank 0 of a layout whose other ranks do not exist."""
    num_ranks = layout.num_workers
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=num_ranks)
    try:
        members = tuple(f"worker {rank}" for rank in range(num_ranks))
        assignment = Assignment(0, layout, members)
        yield form_groups(_FakeBackend(device.type), assignment, 0, device, TIMEOUT)
    finally:
        dist.destroy_process_group()


def _never() -> None:
    """The `interrupt` that never raises."""
