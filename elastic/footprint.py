"""How many bytes a parameter costs in training, and what ZeRO divides of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from elastic.zero import STAGES, Part, divides

Precision = Literal["half", "mixed", "full"]


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes a parameter, by what they are for; `activations` is a rule of thumb."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int = 0

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer + self.activations

    def divided(self, zero: int, num_shards: int) -> float:
        """Bytes a parameter and worker at a ZeRO stage over so many shards.

        Rajbhandari et al., ZeRO, 2020, figure 1: stage 1 divides the optimizer's state, 2 the
        gradients as well, 3 the parameters too; activations belong to each worker's own batch.
        Raises `ValueError` for another stage or fewer shards than one.
        """
        if zero not in STAGES:
            raise ValueError(f"zero={zero}: the ZeRO stage is 0, 1, 2 or 3")
        if num_shards < 1:
            raise ValueError(f"{num_shards} shards: at least 1")
        parts: dict[Part, int] = {
            "optimizer": self.optimizer,
            "gradients": self.gradients,
            "parameters": self.parameters,
        }
        shared = sum(size for part, size in parts.items() if divides(zero, part))
        return self.total - shared + shared / num_shards


FOOTPRINTS: dict[Precision, Footprint] = {
    "half": Footprint(2, 2, 4),
    "mixed": Footprint(2, 2, 12),
    "full": Footprint(4, 4, 8, 8),
}
"""With Adam. `half`: all in 16 bits. `mixed`: weights and gradients in 16 bits; a copy of the
weights and both moments in 32. `full`: all in 32 bits, and for activations as much as for the
moments."""
