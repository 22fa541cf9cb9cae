"""Evaluation on the held-out split: bitwise equal under any dp, fsdp and pp."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist

from actors.runtime.program import Evaluation, Groups, Interrupt
from pipelines.settings import TrainSettings
from pipelines.training.passes.passes import Passes
from pipelines.training.workload.data_shard import DataShard
from pipelines.training.workload.parallel_groups import ParallelGroups
from pipelines.training.workload.workload import PADDING, Workload, concatenate, nothing


def evaluate(
    passes: Passes,
    workload: Workload,
    settings: TrainSettings,
    data_shard: DataShard,
    parallel: ParallelGroups,
    groups: Groups,
    interrupt: Interrupt = nothing,
) -> Evaluation:
    """The mean loss per token over the first `eval_samples` held-out samples, and the means of the
    workload's metrics.

    The samples are cut into fixed microbatches, and one rank sums each. An all-reduce gathers these
    sums as a vector to which every other rank adds 0, which is exact. So the order of reduction
    cannot change the value. Only `tp` and `cp`, which share a microbatch, may change its last bits.
    """
    num_samples = settings.num_evaluated(workload.num_held_out)
    starts = range(0, num_samples, settings.microbatch)
    rounds = data_shard.rounds(len(starts), passes.num_rounds)

    def feed_round(microbatches: tuple[int, ...]) -> Any:
        first = starts[microbatches[0]] if microbatches else num_samples
        samples = range(first, min(first + settings.microbatch, num_samples))
        batches = [workload.read(samples, held_out=True, interrupt=interrupt)] if samples else []
        missing = settings.microbatch - len(samples)
        if passes.needs_full_size and missing:
            batches.append(workload.empty(missing, held_out=True))
        batches = batches or [workload.empty(held_out=True)]
        microbatch_inputs = [workload.feed(b, groups.device, parallel, PADDING) for b in batches]
        return (
            microbatch_inputs[0] if len(microbatch_inputs) == 1 else concatenate(microbatch_inputs)
        )

    summed = passes.evaluate(map(feed_round, rounds), len(rounds))
    size = (1 + len(workload.metrics), 2, len(starts))
    sums = torch.zeros(size, dtype=torch.float64, device=groups.device)
    for microbatches, kinds in zip(rounds, summed, strict=False):
        for microbatch in microbatches if parallel.counts_loss else ():
            for number, (total, count) in enumerate(kinds):
                sums[number, 0, microbatch] = total
                sums[number, 1, microbatch] = count
    dist.all_reduce(sums, group=groups.world)
    values_by_kind = sums.tolist()
    interrupt()  # an aborted reduction may have returned garbage
    (loss, num_losses), *metrics = [[_total(values) for values in k] for k in values_by_kind]
    # Without a count there is no mean.
    means = zip(workload.metrics, metrics, strict=True)
    return Evaluation(
        loss / num_losses if num_losses else None,
        {name: metric / n for name, (metric, n) in means if n},
    )


def _total(values: list[float]) -> float:
    """The exact sum; infinite or NaN if values or sum are not finite."""
    try:
        return math.fsum(values)
    except (OverflowError, ValueError):  # a sum that overflows; inf - inf
        return sum(values)
