"""What of a script's own variables is part of the run's state, as named tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from zlib import crc32

import torch
from torch import Tensor

from pipelines.loop.prepared.kept_objects import KeptObjects
from pipelines.loop.prepared.script_values import ScriptValues

VALUES = ""
TOLERANCE = 1e-3
"""The relative difference of values that workers of different hardware may compute."""


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

    def fingerprint(self) -> tuple[float, float]:
        """Two numbers of which one nearly always differs if other values are kept: the first
        depends on each bit of the numbers, the second is a sum over some of the objects' values."""
        sample = self._objects.sample()
        numbers = _vector(self._values.kept).numpy().tobytes()
        return float(crc32(numbers)), float(sample @ _weights(sample))

    def is_shared(self, totals: Sequence[float], num_workers: int) -> bool:
        """Whether all workers have kept the same, by the sums of their fingerprints."""
        exact, rough = self.fingerprint()
        sample = self._objects.sample()
        size = float(sample.abs() @ _weights(sample).abs())
        is_near = abs(totals[1] - num_workers * rough) <= TOLERANCE * num_workers * size
        return totals[0] == num_workers * exact and is_near


def _weights(sample: Tensor) -> Tensor:
    """Weights of alternating signs, all different."""
    return torch.cos(torch.arange(1.0, len(sample) + 1, dtype=torch.float64))


def _vector(numbers: list[float]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)
