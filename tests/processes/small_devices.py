"""A program whose workers have a device of a fixed size: more state runs out of its memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from actors.runtime.program import Groups, Interrupt
from pipelines.run.program import TrainingProgram
from pipelines.training.replica.replica import ShardedReplica

DEVICE_BYTES = 90 * 10**6


class SmallDeviceReplica(ShardedReplica):
    """Raises the error of torch's allocator if the state and its gradients are too large."""

    def compute(
        self, step: int, interrupt: Interrupt, skipped_batches: Sequence[int] = ()
    ) -> Tensor:
        sizes = self.state_bytes()
        if sizes.param_bytes + sizes.grad_bytes + sizes.optimizer_bytes > DEVICE_BYTES:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
        return super().compute(step, interrupt, skipped_batches)


class SmallDeviceProgram(TrainingProgram):
    """Every worker's device has `DEVICE_BYTES`."""

    def __init__(self, settings: dict[str, Any], data_folder: str | None = None) -> None:
        super().__init__(settings, data_folder, device="cpu")

    def build(self, groups: Groups) -> ShardedReplica:
        return SmallDeviceReplica(self.workload, self.settings, groups, self.pass_observations)
