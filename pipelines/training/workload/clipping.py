"""Clipping of gradients before a step."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from torch import Tensor

from actors.distributed.torch_private import scale_tensors
from pipelines.errors import UserError

NORM_EPS = 1e-6
"""Added to the norm in clipping, as `torch.nn.utils.clip_grad_norm_` does."""


@dataclass(frozen=True)
class Clipping:
    """Clips gradients to a global norm of `max_norm` (Pascanu et al., 2013), then each element to
    [-`max_value`, `max_value`]; None does not clip.

    Raises `UserError` for values that are not above 0.
    """

    max_norm: float | None = None
    max_value: float | None = None

    def __post_init__(self) -> None:
        named = {"max_grad_norm": self.max_norm, "max_grad_value": self.max_value}
        for name, limit in named.items():
            if limit is not None and not (isinstance(limit, int | float) and limit > 0):
                raise UserError(f"{name}={limit!r}: must be a number above 0; None does not clip")

    def apply(self, gradients: Collection[Tensor], divisor: float, norm: float) -> None:
        """Divide gradients in place, and clip them; `norm` is the global norm after division."""
        factor = 1.0 if self.max_norm is None else min(1.0, self.max_norm / (norm + NORM_EPS))
        scale_tensors(list(gradients), factor / divisor)
        if self.max_value is not None:
            for gradient in gradients:
                gradient.clamp_(-self.max_value, self.max_value)
