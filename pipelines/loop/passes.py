"""Training passes of a step, driven by the body of a custom training loop."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from pipelines.loop.body_changes import BodyChanges
from pipelines.loop.loop import Loop
from pipelines.training.attention.cut_sequences import AttentionRefused, over_ring
from pipelines.training.custom.modules.custom_pipeline import CustomBatch
from pipelines.training.custom.modules.microbatch_statistics import MicrobatchStatistics
from pipelines.training.passes.pass_size import PassSize
from pipelines.training.passes.passes import SequentialPasses
from pipelines.training.passes.running_buffers import RunningBuffers
from pipelines.training.sharding.sharded import Sharded
from pipelines.training.workload.parallel_groups import ParallelGroups
from pipelines.training.workload.workload import LossSums, Workload


class LoopPasses(SequentialPasses):
    """Passes whose training part the script drives; evaluation is standard. See `Passes`."""

    def __init__(
        self,
        workload: Workload,
        sharded: Sharded,
        parallel: ParallelGroups,
        moving: RunningBuffers,
        size: PassSize,
        loop: Loop,
    ) -> None:
        super().__init__(workload, sharded, parallel, moving, size)
        self.loop = loop
        moving.may_thaw = True

    def agree_on_size(self) -> int:
        """One microbatch, as the loop's body sees each of `step.batches()`; or all of them."""
        return self.size.largest_share if self.loop.declaration.in_one_pass else 1

    def train(self, microbatch_inputs: Iterable[Any], num_rounds: int) -> list[LossSums]:
        inputs = iter(microbatch_inputs)
        engine = LoopEngine(inputs, num_rounds, self.sharded, self.moving, self.parallel)
        sums = self.loop.compute(engine, self.module)
        used = self.loop.values.scaler.used
        return [LossSums(part.loss / used, part.num_tokens) for part in sums]

    def evaluate(self, microbatch_inputs: Iterable[Any], num_rounds: int) -> list[list[LossSums]]:
        with self.loop.evaluating(self.module):
            return super().evaluate(microbatch_inputs, num_rounds)


class LoopEngine:
    """Gradient accumulation and buffer updates around a step's passes; see `Engine`."""

    def __init__(
        self,
        microbatches: Iterator[CustomBatch],
        num_microbatches: int,
        sharded: Sharded,
        moving: RunningBuffers,
        parallel: ParallelGroups,
    ) -> None:
        self.num_microbatches = num_microbatches
        self._microbatches = microbatches
        self._sharded = sharded
        self._moving = moving
        self._parallel = parallel
        self._num_begun = 0
        self._num_merged = 1
        """The microbatches of the present pass."""
        self._modes = ExitStack()
        """What the script's thread computes in place of torch's attention and draws."""
        self._changes = BodyChanges(moving.installed)

    def next(self) -> CustomBatch:
        self._changes.refuse()
        self._modes.close()
        microbatch = next(self._microbatches)
        # Else copies of weights from the pass before, in their dtype of autocast, would be used
        # again, and FSDP would reduce gradients before all of the pass have arrived.
        torch.clear_autocast_cache()
        self._num_begun += 1
        if self._num_begun in (1, self.num_microbatches):
            self._sharded.accumulate(self._num_begun == self.num_microbatches)
        self._moving.begin_pass()
        if microbatch.length:
            self._modes.enter_context(over_ring(microbatch.length, self._parallel))
        seeds = microbatch.seeds
        self._num_merged = 1 if seeds is None or not microbatch.num_samples else len(seeds.seeds)
        if seeds is not None and seeds.draws is not None:
            self._modes.enter_context(seeds.draws)
            self._modes.enter_context(MicrobatchStatistics(len(seeds.seeds)))
        return microbatch

    def forwarded(self, count: Tensor) -> None:
        self._modes.close()
        if self._parallel.num_cp > 1:
            self._modes.enter_context(AttentionRefused())
        is_last = self._num_begun == self.num_microbatches
        self._moving.end_pass(count, is_last, self._num_merged)

    def called(self) -> None:
        self._changes.note()

    def all_backwarded(self) -> None:
        self._changes.refuse()

    def left(self) -> None:
        self._modes.close()
