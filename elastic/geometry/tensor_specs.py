"""Tensor specs: the logical tensors of a run's state, independent of the layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import Literal, NamedTuple

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

Kind = Literal["parameter", "optimizer", "buffer", "script"]
"""The kind of a tensor for ZeRO: from zero=1 on, `fsdp` splits parameters and optimizer state,
but never buffers. What a `script` computes itself may differ by rounding errors between machines,
so audits do not compare it."""


class Ownership(NamedTuple):
    """Which rank owns a tensor that an axis deals whole instead of cutting it.

    The tensors that are dealt lie in a row, each as long as its cost. The ranks own equal stretches
    of the row, and a tensor belongs to the rank that owns its middle. So every rank gets about the
    same cost, and a change of the degree moves few tensors.
    """

    middle: float
    length: int
    """The length of the row."""

    def rank(self, degree: int, num_stages: int = 1) -> int:
        """The index of the owner on an axis of this degree.

        Each of `num_stages` pipeline stages has about an equal stretch of the row, which all ranks
        of the axis share.
        """
        return int(self.middle * degree * num_stages / self.length) % degree


def deal_out(costs: Sequence[int]) -> list[Ownership]:
    """The ownership of tensors of these costs, each at least 1, in their order."""
    ends = list(accumulate(costs))
    middles = (end - cost / 2 for end, cost in zip(ends, costs, strict=True))
    return [Ownership(middle, ends[-1]) for middle in middles]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One logical tensor: its whole shape, and which dim each axis splits.

    `layer` is the layer of the tensor (None: every pipeline stage holds it). `layer_costs` are
    the costs of all layers, by which layers are dealt to stages (only needed if `pp` > 1). A tensor
    of layer 0 that `ties_ends` lies on the last stage too, as the weight of a tied head does.
    `fsdp_dim`, `tp_dim` and `ep_dim` are the dims that these axes split (None: the axis
    replicates). A tensor with an `ep_dim` belongs to experts. With an `ownership`, `fsdp` gives
    the whole tensor to one rank, and each other rank an empty part in `fsdp_dim`. `dtype` is a key
    of `ITEMSIZE_BYTES`.
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
    ownership: Ownership | None = None
    ties_ends: bool = False

    @property
    def itemsize_bytes(self) -> int:
        return ITEMSIZE_BYTES[self.dtype]

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.itemsize_bytes
