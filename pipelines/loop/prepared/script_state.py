"""What of a script's own variables is part of the run's state, as named tensors."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import NamedTuple
from zlib import crc32

import torch
from torch import Tensor

from pipelines.loop.prepared.kept_objects import KeptObjects
from pipelines.loop.prepared.script_values import ScriptValues

VALUES = ""
TOLERANCE = 1e-3
"""The relative difference of values that workers of different hardware may compute."""


class Fingerprint(NamedTuple):
    """A checksum of the numbers, and a weighted sum of some of the objects' values, whose size is
    that of its terms."""

    exact: float
    rough: float
    size: float

    def is_shared(self, totals: Sequence[float], num_workers: int) -> bool:
        """Whether all workers have about the same, by the sums of their first two numbers."""
        exact, rough = totals
        is_near = abs(rough - num_workers * self.rough) <= TOLERANCE * num_workers * self.size
        return exact == num_workers * self.exact and is_near


NO_FINGERPRINT = Fingerprint(0.0, 0.0, 0.0)


class ScriptState:
    """The numbers of optimizers, schedulers and scaler, and the objects that the script keeps.

    A script that begins a step again, or in another worker's place, gets those of the beginning of
    the step. Every worker has the same.
    """

    def __init__(self, values: ScriptValues, objects: KeptObjects) -> None:
        self._values = values
        self._objects = objects
        self.initial = {VALUES: _vector(values.initial), **objects.begin()}
        """All at step 0."""

    def keep(self) -> None:
        """Begin the next step with what is there. Raises `LoopMisused` for other shapes."""
        self._values.keep()
        self._objects.keep()

    def restore(self) -> None:
        """Begin the present step with what was kept."""
        self._values.restore()
        self._objects.restore()

    def kept(self) -> dict[str, Tensor]:
        """All at the beginning of the present step; valid until the next `keep`."""
        return {VALUES: _vector(self._values.kept), **self._objects.kept}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take these in place of what was kept."""
        self._values.kept = state[VALUES].tolist()
        self._objects.load(state)

    def fingerprint(self) -> Fingerprint:
        """What nearly always differs if two workers have kept different values."""
        exact = float(crc32(array("d", self._values.kept).tobytes()))
        if not self._objects.objects:
            return Fingerprint(exact, 0.0, 0.0)
        weighted = self._objects.sample()
        # Weights of both signs, all different.
        weighted *= torch.cos(torch.arange(1.0, len(weighted) + 1, dtype=torch.float64))
        return Fingerprint(exact, float(weighted.sum()), float(weighted.abs().sum()))


def _vector(numbers: list[float]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)
