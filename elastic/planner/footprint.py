"""Footprint: the bytes of a worker for each parameter, by precision and ZeRO stage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from elastic.geometry.zero import STAGES, ZeroPart, divides

Precision = Literal["half", "mixed", "full"]


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes for each parameter, by purpose; `activations` is a rule of thumb."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int = 0

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer + self.activations

    def divided(self, zero: int, num_shards: int) -> float:
        """Bytes on each worker for each parameter, at a ZeRO stage over `num_shards` shards.

        Rajbhandari et al., ZeRO, 2020, figure 1: stage 1 divides the optimizer state, 2 also the
        gradients, 3 also the parameters; each worker has the activations of its own batch.
        Raises `ValueError` for another stage or fewer shards than one.
        """
        if zero not in STAGES:
            raise ValueError(f"zero={zero}: the ZeRO stage must be 0, 1, 2 or 3")
        if num_shards < 1:
            raise ValueError(f"{num_shards} shards: use at least 1")
        parts: dict[ZeroPart, int] = {
            "optimizer": self.optimizer,
            "gradients": self.gradients,
            "parameters": self.parameters,
        }
        divided = sum(size for part, size in parts.items() if divides(zero, part))
        return self.total - divided + divided / num_shards


FOOTPRINTS: dict[Precision, Footprint] = {
    "half": Footprint(2, 2, 4),
    "mixed": Footprint(2, 2, 12),
    "full": Footprint(4, 4, 8, 8),
}
"""Footprints with Adam. `half`: all in 16 bits. `mixed`: weights and gradients in 16 bits, a copy
of the weights and both moments in 32 bits. `full`: all in 32 bits, with as many bytes for
activations as for the moments."""
