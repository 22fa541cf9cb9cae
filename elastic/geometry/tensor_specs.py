"""Tensor specs: the logical tensors of a run's state, whatever the layout."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Literal

ITEMSIZE_BYTES = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "int64": 8,
    "int32": 4,
    "uint8": 1,
    "bool": 1,
}

Kind = Literal["parameter", "optimizer", "buffer"]
"""What a tensor is to ZeRO: `fsdp` splits parameters and optimizer state from zero=1 on,
buffers never."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One logical tensor: its whole shape, and which dim each axis splits.

    `layer` is the layer it belongs to (None: held by every pipeline stage); `layer_costs` are
    the costs of all layers, by which they are dealt to stages (only needed where `pp` > 1).
    `fsdp_dim`, `tp_dim` and `ep_dim` are the dims that those axes split (None: replicated over
    the axis); a tensor with an `ep_dim` belongs to experts. `dtype` is a key of
    `ITEMSIZE_BYTES`.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    layer: int | None = None
    fsdp_dim: int | None = None
    tp_dim: int | None = None
    ep_dim: int | None = None
    kind: Kind = "parameter"
    layer_costs: tuple[int, ...] = ()

    @property
    def itemsize_bytes(self) -> int:
        return ITEMSIZE_BYTES[self.dtype]

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.itemsize_bytes
