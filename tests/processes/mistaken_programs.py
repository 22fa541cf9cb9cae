"""Programs with one mistake each, which the comparison with the plain loop must find."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping, Sequence

import torch
from replica_program import program_with
from torch import Tensor

from actors.runtime.program import Applied, Evaluation, Interrupt
from elastic.protocol.votes import Vote
from pipelines.training.passes.step_samples import StepSamples
from pipelines.training.replica.replica import ShardedReplica
from pipelines.training.workload.workload import ModuleInputs

MISTAKEN_STEP = 12
LONG_S = 5.0


class ZeroesMoments(ShardedReplica):
    """Forgets Adam's moments in every reshard but the first."""

    def adopt(self, tensors: Mapping[str, Tensor]) -> None:
        if self.groups.assignment.generation > 1:
            for name, tensor in tensors.items():
                if name.endswith(("exp_avg", "exp_avg_sq")):
                    tensor.zero_()
        super().adopt(tensors)


class DoublesASample(ShardedReplica):
    """Reads the first sample of one step twice and the second not at all."""

    def _feed_round(self, step: int, microbatches: Sequence[int]) -> ModuleInputs:
        if step == MISTAKEN_STEP and 1 in microbatches:
            first = StepSamples(self.workload, self.settings)
            first.draw(step, ((0,),), ())
            first_samples = first._samples[0].samples
            own = self.samples._samples[1]
            self.samples._samples[1] = own._replace(samples=first_samples)
        return super()._feed_round(step, microbatches)


class ScalesGradients(ShardedReplica):
    """Scales gradients as if there were three workers, where there are four."""

    def apply(self, step: int, vote: Vote) -> Applied:
        torch._foreach_mul_(list(self.state.gradients().values()), 4 / 3)
        return super().apply(step, vote)


class SeedsByRank(ShardedReplica):
    """Draws its randomness by rank, so that it depends on the world."""

    def _feed_round(self, step: int, microbatches: Sequence[int]) -> ModuleInputs:
        fed = super()._feed_round(step, microbatches)
        seeds = torch.full_like(fed.keywords["seeds"], 1000 * step + self.groups.world_rank)
        return fed._replace(keywords=fed.keywords | {"seeds": seeds})


class DiesOfASample(ShardedReplica):
    """One microbatch of one step kills each worker that computes it, as a bad sample may."""

    def _feed_round(self, step: int, microbatches: Sequence[int]) -> ModuleInputs:
        if step == MISTAKEN_STEP and 5 in microbatches:
            os.kill(os.getpid(), signal.SIGKILL)
        return super()._feed_round(step, microbatches)


class DiesOfAHeldOutSample(ShardedReplica):
    """The first held-out microbatch kills the worker that evaluates it."""

    def evaluate(self, step: int, interrupt: Interrupt) -> Evaluation:
        if self.data_shard.data_rank == 0 and self.groups.assignment.generation > 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().evaluate(step, interrupt)


class SkipsAReduction(ShardedReplica):
    """Worker 1 does not take part in the reduction of the gradients of one step."""

    def compute(
        self, step: int, interrupt: Interrupt, skipped_batches: Sequence[int] = ()
    ) -> Tensor:
        if is_first_try_of_worker_1(self, step):
            return torch.zeros(3, dtype=torch.float64)
        return super().compute(step, interrupt, skipped_batches)


class TakesLongOnce(ShardedReplica):
    """Worker 1 computes for longer than the hang timeout in one step."""

    def compute(
        self, step: int, interrupt: Interrupt, skipped_batches: Sequence[int] = ()
    ) -> Tensor:
        if is_first_try_of_worker_1(self, step):
            take_long()
        return super().compute(step, interrupt, skipped_batches)


def is_first_try_of_worker_1(replica: ShardedReplica, step: int) -> bool:
    assignment = replica.groups.assignment
    is_first = assignment.generation == 1 and step == MISTAKEN_STEP
    return is_first and replica.groups.world_rank == 1


def take_long() -> None:
    end = time.monotonic() + LONG_S
    while time.monotonic() < end:
        pass


moments_zeroed = program_with(ZeroesMoments)
sample_doubled = program_with(DoublesASample)
gradients_scaled = program_with(ScalesGradients)
seeds_by_rank = program_with(SeedsByRank)
dies_of_a_sample = program_with(DiesOfASample)
dies_of_a_held_out_sample = program_with(DiesOfAHeldOutSample)
skips_a_reduction = program_with(SkipsAReduction)
takes_long_once = program_with(TakesLongOnce)
