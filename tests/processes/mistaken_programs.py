"""Programs with one mistake each, which the comparison with the plain loop must find."""

from __future__ import annotations

import os
import signal
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


moments_zeroed = program_with(ZeroesMoments)
sample_doubled = program_with(DoublesASample)
gradients_scaled = program_with(ScalesGradients)
seeds_by_rank = program_with(SeedsByRank)
dies_of_a_sample = program_with(DiesOfASample)
dies_of_a_held_out_sample = program_with(DiesOfAHeldOutSample)
