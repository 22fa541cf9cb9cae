"""Clipping: how a step limits its gradients."""

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
    """Gradients are scaled to a global norm of at most `max_norm` (Pascanu et al., 2013), then each
    element is limited to `max_value` in both directions; None: not limited.

    Raises `UserError` for limits that are not above 0.
    """

    max_norm: float | None = None
    max_value: float | None = None

    def __post_init__(self) -> None:
        limits = {"max_grad_norm": self.max_norm, "max_grad_value": self.max_value}
        for name, limit in limits.items():
            if limit is not None and not limit > 0:
                raise UserError(f"{name}={limit}: must be above 0, or None")

    def apply(self, gradients: Collection[Tensor], divisor: float, norm: float) -> None:
        """Divide gradients in place, and limit them; `norm` is the global one after division."""
        factor = 1.0 if self.max_norm is None else min(1.0, self.max_norm / (norm + NORM_EPS))
        scale_tensors(list(gradients), factor / divisor)
        if self.max_value is not None:
            for gradient in gradients:
                gradient.clamp_(-self.max_value, self.max_value)
