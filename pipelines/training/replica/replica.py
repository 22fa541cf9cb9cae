"""The replica of one rank: its modules and optimizer under one assignment."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from actors.runtime.program import Applied, Evaluation, Groups, Interrupt, StateBytes
from elastic.protocol.votes import Vote
from pipelines.settings import TrainSettings
from pipelines.training.custom.custom_pipelined import CustomPipelined
from pipelines.training.passes.evaluation import evaluate
from pipelines.training.passes.pass_size import PassObservations, PassSize
from pipelines.training.passes.passes import Passes, SequentialPasses
from pipelines.training.passes.pipeline import Pipelined
from pipelines.training.passes.prefetch import SamplePrefetch
from pipelines.training.passes.running_buffers import RunningBuffers
from pipelines.training.passes.stage_buffers import StageBuffers
from pipelines.training.passes.stage_modules import Stage, build_stages
from pipelines.training.passes.step_samples import StepSamples
from pipelines.training.replica.local_state import LocalState
from pipelines.training.replica.sample_log import append_samples
from pipelines.training.replica.statistics import Statistics, StatisticsReport
from pipelines.training.sharding.parallelize import InterruptHooks, parallelize
from pipelines.training.sharding.tied_gradients import TiedGradients, tied_parameters
from pipelines.training.tensor.tensor_parallel import (
    partial_gradient_names,
    reduce_partial_gradients,
)
from pipelines.training.workload.data_shard import DataShard, Rounds, microbatches_in, sample_ids
from pipelines.training.workload.parallel_groups import ParallelGroups
from pipelines.training.workload.seeds import seed_device
from pipelines.training.workload.state import buffers, build_on_meta, optimizer_factory_of
from pipelines.training.workload.workload import PADDING, Workload


class ShardedReplica:
    """Trains a workload under any layout; see `actors.runtime.program.Replica`."""

    def __init__(
        self,
        workload: Workload,
        settings: TrainSettings,
        groups: Groups,
        observations: PassObservations | None = None,
    ) -> None:
        """`observations` are those of the process' earlier generations."""
        self.observations = observations or PassObservations()
        self.pass_size = PassSize(workload, settings, groups, self.observations)
        self.workload = workload
        self.settings = settings
        self.groups = groups
        self.data_shard = DataShard.of(groups)
        self.prefetch = SamplePrefetch(workload, settings, self.data_shard)
        self.parallel = ParallelGroups.of(groups, workload.seq_len)
        stages = build_stages(workload, settings, groups.layout, groups.place.pp, self.parallel)
        modules = [stage.module for stage in stages]
        self.sharded = parallelize(modules, workload, groups, self.parallel, settings)
        blocks = [block for module in modules for block in workload.blocks(module)]
        self.interrupt_hooks = InterruptHooks(blocks, groups.device)
        optimizer_factory = optimizer_factory_of(workload, settings)
        self.state = LocalState(
            self.sharded,
            settings,
            optimizer_factory,
            groups.device,
            workload.whole_parameters,
            tied_parameters(workload, settings, groups.layout),
        )
        self.tied_gradients = TiedGradients(self.state.trained_ties(), groups)
        self.moving: RunningBuffers | StageBuffers
        self.passes: Passes
        if groups.layout.pp > 1:
            all_buffers = dict(buffers(build_on_meta(workload, settings)))
            moving = StageBuffers(modules, all_buffers, groups.world, groups.device)
            self.moving, self.passes = moving, self._pipeline_passes(stages, moving)
        else:
            whole = RunningBuffers(modules, groups.world)
            self.moving, self.passes = whole, self._passes(whole)
        self.samples = StepSamples(workload, settings)
        self.step_statistics = Statistics(workload, settings, groups, self.state)
        self.partial_gradients = partial_gradient_names(
            self.state.shards, workload.shape(), self.parallel
        )

    def _passes(self, moving: RunningBuffers) -> Passes:
        return SequentialPasses(self.workload, self.sharded, self.parallel, moving, self.pass_size)

    def _pipeline_passes(self, stages: Sequence[Stage], moving: StageBuffers) -> Passes:
        args = (self.workload, stages, self.sharded, self.groups, self.parallel, self.settings)
        custom_loss = self.workload.custom_loss
        if custom_loss is not None:
            return CustomPipelined(*args, custom_loss=custom_loss, moving=moving)
        return Pipelined(*args)

    def adopt(self, tensors: Mapping[str, Tensor]) -> None:
        """Make these the local state; see `LocalState.adopt`."""
        self.state.adopt(tensors)
        self.moving.keep(self.state.buffers)

    def tensors(self) -> dict[str, Tensor]:
        """The live local state by logical name, which shares memory with the modules."""
        return self.state.tensors()

    def compute(
        self, step: int, interrupt: Interrupt, skipped_batches: Sequence[int] = ()
    ) -> Tensor:
        """Run forward, backward and gradient reduction of this rank's microbatches.

        Returns float64 `(loss sum, token count, squared norm of the local gradients, each divided
        by its number of copies)`, shape (3,).
        """
        self.interrupt_hooks.interrupt = interrupt
        rounds = self.data_shard.rounds(
            self.settings.num_microbatches, self.passes.num_rounds, self.passes.agree_on_size()
        )
        self.samples.draw(step, rounds, skipped_batches)
        self._record_samples(step, rounds, skipped_batches)
        self.prefetch.start(step, rounds, skipped_batches)
        self.step_statistics.begin(step, rounds)
        microbatch_inputs = (self._feed_round(step, microbatches) for microbatches in rounds)
        sums = torch.zeros(3, dtype=torch.float64, device=self.groups.device)
        self.moving.begin()
        self.sharded.gather(interrupt)
        results = self.passes.train(microbatch_inputs, len(rounds))
        if self.parallel.counts_loss and results:
            for index, values in enumerate(zip(*results, strict=True)):
                sums[index] = torch.stack(values).double().sum()
        with self.observations.waits.reducing(self.groups.device):
            self.sharded.reduce(interrupt)
            self.moving.reduce()
        if self.moving.moving:
            self.pass_size.note_updated_buffers()
        if self.parallel.tp is not None and self.partial_gradients:
            gradients = self.state.gradients()
            partial = [gradients[name] for name in self.partial_gradients if name in gradients]
            if partial:  # frozen parameters have none
                reduce_partial_gradients(partial, self.parallel.tp)
        self.tied_gradients.sum(self.state.gradients())
        self.prepare_gradients()
        self.step_statistics.note_gradients()
        sums[2] = self.state.squared_norm()
        return sums

    def prepare_gradients(self) -> None:
        """Nothing: only a script scales its losses, and steps some of its optimizers alone."""

    def read_early(self) -> None:
        """Read the next step's first pass; see `StepSamples.read_early`."""
        self.samples.read_early()

    def apply(self, step: int, vote: Vote) -> Applied:
        """Divide the gradients by the number of tokens, clip them and step the optimizer, without
        any collective.

        If the gradients of any rank are not finite, parameters do not change.
        """
        lr = self.state.optimizer.schedule(step)
        skipped = vote.num_nonfinite > 0 or vote.num_tokens == 0 or not math.isfinite(lr)
        norm = None
        self.step_statistics.before_step()
        if not skipped:
            norm = math.sqrt(vote.sq_grad_norm) / vote.num_tokens
            gradients, clipping = self.state.gradients(), self.state.optimizer_factory.clipping
            clipping.apply(gradients.values(), vote.num_tokens, norm)
            self.state.step(gradients)
            self.moving.apply()
        self.step_statistics.after_step(vote.num_tokens)
        self.state.drop_gradients()
        return Applied(lr, norm, skipped)

    def resume(self, committed_step: int, interrupt: Interrupt) -> None:
        """Nothing: only a script has its own place in training."""

    def finish(self, interrupt: Interrupt) -> None:
        """Nothing: only a script has code below its loop."""

    @property
    def is_done(self) -> bool:
        """Only a script ends a run early."""
        return False

    def between_steps(self, interrupt: Interrupt | None) -> Mapping[str, float | None]:
        """Nothing: only a script has code between two steps."""
        return {}

    def statistics(self) -> StatisticsReport | None:
        """The statistics of the step just applied, if they are due; see `Statistics`."""
        return self.step_statistics.report()

    def drop_gradients(self) -> None:
        """Drop the gradients of a step whose vote no worker has seen."""
        self.state.drop_gradients()

    def evaluate(self, step: int, interrupt: Interrupt) -> Evaluation:
        """The loss and metrics of the held-out split; see `passes.evaluation`."""
        self.interrupt_hooks.interrupt = interrupt
        self.sharded.gather(interrupt)
        return evaluate(
            self.passes,
            self.workload,
            self.settings,
            self.data_shard.even,
            self.parallel,
            self.groups,
            interrupt,
        )

    def state_bytes(self) -> StateBytes:
        """The bytes of the state on this rank's device; see `LocalState.state_bytes`."""
        return self.state.state_bytes()

    def _feed_round(self, step: int, microbatches: Sequence[int]) -> Any:
        device, parallel = self.groups.device, self.parallel
        if not microbatches:
            full_size = self.settings.microbatch if self.passes.needs_full_size else 0
            return self.workload.feed(self.workload.empty(full_size), device, parallel, PADDING)
        parts = self.samples.parts(microbatches)
        seeds = [part.seed for part in parts]
        with self.observations.waits.reading():
            batch = self.samples.read(parts, self.interrupt_hooks.interrupt)
        seed_device(device, seeds[0])
        self.workload.seed_forward(seeds[0])
        return self.workload.feed(batch, device, parallel, *seeds)

    def _record_samples(self, step: int, rounds: Rounds, skipped_batches: Sequence[int]) -> None:
        """Append the ids of this rank's samples to a file, if the settings say so."""
        file = self.settings.record_samples
        if file and self.parallel.records_samples:
            generation = self.groups.assignment.generation
            ids = sample_ids(self.settings, step, microbatches_in(rounds), skipped_batches)
            append_samples(file, step, generation, self.groups.world_rank, ids)
