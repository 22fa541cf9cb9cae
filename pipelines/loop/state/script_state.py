"""What of a script's own variables is part of the run's state, as named tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from pipelines.loop.modules.module_numbers import ModuleNumbers
from pipelines.loop.state.kept_objects import NUM_COMPARED, KeptObjects, samples_of
from pipelines.loop.state.script_values import ScriptValues
from pipelines.training.workload.clipping import Clipping

VALUES, MODULES = "", "/modules"
NUMBERS_TOLERANCE, OBJECTS_TOLERANCE = 1e-9, 1e-3
"""The relative differences that machines of different kinds may compute."""
LIMIT = 1e290
"""Larger numbers would overflow in a sum."""
WEIGHTS = torch.cos(torch.arange(1.0, NUM_COMPARED + 1, dtype=torch.float64))
"""Of both signs, all different."""


class ScriptState:
    """The numbers of optimizers, schedulers, scaler and modules, and the objects that the script
    keeps.

    A script that begins a step again, or in another worker's place, gets those of the beginning of
    the step. Every worker has the same.
    """

    def __init__(
        self, values: ScriptValues, objects: KeptObjects, modules: ModuleNumbers | None = None
    ) -> None:
        self._values = values
        self._objects = objects
        self._modules = modules or ModuleNumbers()
        self.initial = {**_vectors(values.initial, self._modules.initial), **objects.begin()}
        """All at step 0."""
        self._begun: dict[str, Tensor] | None = None
        """All at the beginning of the present step, if that is not what was kept."""
        self._note_fingerprint()

    def keep(self, changed: Mapping[str, Tensor]) -> None:
        """Begin the next step with what is there, and with what the script has changed in its
        models. Raises `LoopMisused` for other shapes."""
        clipping = self._values.clipping or Clipping()
        chosen = [
            float(sum(1 << number for number in self._values.stepped)),
            clipping.max_norm or 0.0,
            clipping.max_value or 0.0,
        ]
        self._values.keep()
        self._objects.keep()
        self._modules.keep()
        self._begun = None
        self._note_fingerprint(chosen, changed)

    def begin_here(self) -> None:
        """Begin the present step with what is there now when it comes again to this worker: the
        script has changed it since, in code that does not run again then."""
        live, kept = self.live(), self.kept()
        is_kept = live.keys() == kept.keys() and all(torch.equal(live[n], kept[n]) for n in kept)
        self._begun = None if is_kept else live

    def restore(self) -> None:
        """Begin the present step with what was kept, or with what was there at `begin_here`."""
        begun = self.kept() if self._begun is None else self._begun
        self._values.restore(begun[VALUES].tolist())
        self._objects.restore(begun)
        if MODULES in begun:
            self._modules.restore(begun[MODULES].tolist())

    def kept(self) -> dict[str, Tensor]:
        """All at the beginning of the present step; valid until the next `keep`."""
        return {**_vectors(self._values.kept, self._modules.kept), **self._objects.kept}

    def live(self) -> dict[str, Tensor]:
        """All as it is now, within a step or behind it."""
        vectors = _vectors(self._values.live(), self._modules.live())
        return {**vectors, **self._objects.live()}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take these in place of what was kept."""
        self._values.kept = state[VALUES].tolist()
        self._objects.load(state)
        if MODULES in state:
            self._modules.kept = state[MODULES].tolist()
        self._note_fingerprint()

    def forget_step(self) -> None:
        """Compare no longer which optimizers have stepped: workers that join do not know it."""
        self._note_fingerprint()

    def is_shared(self, totals: Sequence[float], num_workers: int) -> bool:
        """Whether all workers have kept about the same, by the sums of their fingerprints."""
        triples = zip(totals, self.fingerprint, self._tolerances, strict=True)
        return all(
            abs(total - num_workers * own) <= num_workers * tolerance
            for total, own, tolerance in triples
        )

    def _note_fingerprint(
        self, chosen: Sequence[float] = (0.0,) * 3, changed: Mapping[str, Tensor] | None = None
    ) -> None:
        numbers = [number if abs(number) < LIMIT else 0.0 for number in self._values.kept]
        self.fingerprint = [*numbers, *chosen]
        """The numbers, which optimizers have stepped, how gradients were clipped, and weighted sums
        of a few values of all that was changed in the models and of each kept tensor: for a
        comparison of workers by one sum over all."""
        self._tolerances = [NUMBERS_TOLERANCE * abs(number) for number in self.fingerprint]
        weighted = samples_of((changed or {}).values()) * WEIGHTS
        self.fingerprint.append(weighted.sum().item())
        self._tolerances.append(OBJECTS_TOLERANCE * weighted.abs().sum().item())
        if self._objects.kept:
            weighted = samples_of(self._objects.kept.values()) * WEIGHTS
            self.fingerprint += weighted.sum(1).tolist()
            sizes = weighted.abs().sum(1).tolist()
            for size, is_exact in zip(sizes, self._objects.are_exact(), strict=True):
                tolerance = NUMBERS_TOLERANCE if is_exact else OBJECTS_TOLERANCE
                self._tolerances.append(tolerance * size)


def _vector(numbers: list[float]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def _vectors(values: list[float], modules: list[float]) -> dict[str, Tensor]:
    return {VALUES: _vector(values)} | ({MODULES: _vector(modules)} if modules else {})
