"""Comparison of a loss with the mean of the losses of its parts, during the trial of a script."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from pipelines.settings.user_code import place_of_caller
from pipelines.training.workload.seeds import generator_states
from pipelines.training.workload.trees import tensors_in
from pipelines.training.workload.workload import LossSums

CPU = torch.device("cpu")
TOLERANCES, COARSE = {torch.float32: 1e-4, torch.float64: 1e-7}, 2e-2
"""Relative, of sums in another order, and of a loss that autocast may have rounded."""
COARSE_TYPES = (torch.bfloat16, torch.float16)
OF_MICROBATCH = (
    "batch_size, and not only on the batch: if it is a sum over the batch, "
    "step.backward(loss * microbatches) has that sum, and this note is not for you; if it is a "
    "mean of tokens, pass their number to step.backward(loss, weight); if it compares samples with "
    "each other, load the whole batch with microbatches=1"
)
OF_PASS = (
    "how many workers share a batch: if it is a sum over the samples, give "
    'run.range(..., reduction="sum"); if it is a mean of tokens, call '
    "run.step.backward(loss, weight) with their number in place of loss.backward(); if it compares "
    "samples with each other, give run.range(..., microbatches=1)"
)
"""What to do about a loss that depends on the grouping."""
MODES = ("BatchNorm", "Dropout", "AlphaDropout")
"""Modules of torch, by their names, that compute something else in evaluation mode."""


class GroupingTrial:
    """Finds a loss that depends on how the samples of a batch are grouped into microbatches.

    The halves of a microbatch are computed, and then the whole. Nothing is compared where the loss
    draws random numbers, which depend on the grouping, too.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._place = ""
        self._is_random = self._is_coarse = False
        self._hooks: list[RemovableHandle] = []
        self._state: list[Any] = []

    def begin(self) -> None:
        """Before the first part. Dropout and BatchNorm do nothing from now on."""
        for part in self._module.modules():
            if type(part).__name__.startswith(MODES):
                part.eval()
            self._hooks.append(part.register_forward_hook(self._look))

    def before(self) -> None:
        """Before what may draw random numbers: the `collate`, and the forward."""
        self._state = generator_states(CPU)

    def after(self) -> None:
        self._place = place_of_caller()
        self._is_random |= self._state != generator_states(CPU)

    def _look(self, part: nn.Module, inputs: Any, output: Any) -> None:
        """Note whether a loss may have been computed from values of few digits, by autocast."""
        self._is_coarse |= any(tensor.dtype in COARSE_TYPES for tensor in tensors_in(output))

    def note(self, sums: Sequence[LossSums], advice: str = OF_MICROBATCH) -> str | None:
        """A note for the user, by the losses of both halves and of the whole."""
        while self._hooks:
            self._hooks.pop().remove()
        *halves, whole = ((float(part.loss), float(part.num_tokens)) for part in sums)
        count = sum(number for _, number in halves)
        if self._is_random or not count or not whole[1]:
            return None
        mean, together = sum(loss for loss, _ in halves) / count, whole[0] / whole[1]
        if not isfinite(mean - together):
            return None
        fine = TOLERANCES.get(sums[0].loss.dtype, COARSE)
        tolerance = COARSE if self._is_coarse else fine
        if abs(mean - together) <= tolerance * max(abs(mean), abs(together)) + tolerance**2:
            return None
        return (
            f"{self._place}the loss of some samples ({together:.4g}) is not the mean of those of "
            f"both halves ({mean:.4g}), so training depends on {advice}"
        )
