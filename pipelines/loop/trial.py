"""Trial of a script before its run: the body of one step, with the whole model in one process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import redirect_stdout
from typing import Any

import torch
from torch import Tensor, nn

from actors.runtime.program import Evaluation
from pipelines.loop.loop import Loop
from pipelines.loop.microbatch_state import MicrobatchStates
from pipelines.loop.prepared.errors import LoopMisused
from pipelines.loop.step import Position
from pipelines.loop.thread import Request
from pipelines.training.custom.block_flow import in_dtypes
from pipelines.training.custom.custom_module import parameter_bytes, seeded
from pipelines.training.custom.custom_pipeline import CustomBatch
from pipelines.training.custom.custom_workload import CustomWorkload
from pipelines.training.workload.parallel_groups import ALONE

MAX_BYTES = 1 << 28
"""The parameters of the largest model that is tried: the trial needs as much again for a copy, and
for gradients, and the user waits for it."""
NUM_MICROBATCHES = 2


def try_body(loop: Loop, workload: CustomWorkload) -> None:
    """Find what would fail on each worker in its warm-up: run the script up to its first step, and
    the body of that on the host.

    What follows the body does not run: it may write files that a resumed run needs. Raises
    `LoopMisused`, and what the script raises.
    """
    if parameter_bytes(loop.declaration.model) > MAX_BYTES:
        return
    module = in_dtypes(workload.recipe.model(), workload.recipe)
    # What the body prints belongs to the workers' logs.
    with seeded(workload.settings.seed), open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        loop.begin(1, Position(), lambda: loop.state.kept())
        while loop.await_arrival() and loop.request is not None:
            loop.answer(_answer(loop.request, workload))
        if loop.left_after is not None:
            return
        loop.compute(_TrialEngine(workload, loop.declaration.states), module)
    _refuse_no_gradient(module)


class _TrialEngine:
    """An engine of the first samples; see `pipelines.loop.step.Engine`."""

    num_microbatches = NUM_MICROBATCHES

    def __init__(self, workload: CustomWorkload, states: MicrobatchStates) -> None:
        self._microbatches = self._read(workload)
        self._states = states
        self._dtype = workload.dtype

    def next(self) -> CustomBatch:
        torch.clear_autocast_cache()
        return next(self._microbatches)

    def forwarded(self, count: Tensor) -> None:
        """No collective follows."""

    def _read(self, workload: CustomWorkload) -> Iterator[CustomBatch]:
        size = workload.settings.microbatch
        samples = workload.first(self.num_microbatches * size)
        for first in range(0, len(samples), size):
            batch = workload.read(samples[first : first + size])
            workload.seed_forward(first)
            self._states.begin_microbatch(first // size, self._dtype, torch.device("cpu"))
            yield workload.feed(batch, torch.device("cpu"), ALONE, first)


def _answer(request: Request, workload: CustomWorkload) -> Any:
    """The model has the values of step 0 already; its loss does not matter."""
    if request is Request.EVALUATION:
        return Evaluation(1.0, dict.fromkeys(workload.metrics, 1.0))
    return None


def _refuse_no_gradient(module: nn.Module) -> None:
    if all(parameter.grad is None for parameter in module.parameters()):
        raise LoopMisused(
            "step 1: the losses of `step.backward(loss)` do not depend on the model's parameters: "
            "compute them with the model that run.prepare returns"
        )
