"""What is trained: a module, its loss and its samples, without a word of how it is spread."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch import Generator, Tensor, nn

from elastic.limits import Limits

Style = Literal["colwise", "rowwise", "sequence", "vocabulary"]
"""How tensor parallelism treats a module, in torch.distributed.tensor.parallel's terms;
`vocabulary` is an embedding cut by rows."""


@dataclass(frozen=True, slots=True)
class Layer:
    """A part of a model that lies on one pipeline stage: its modules by name, and its cost
    in multiplications a token, by which layers are dealt to stages."""

    modules: tuple[str, ...]
    cost: int


@dataclass(frozen=True, slots=True)
class Shape:
    """What a model offers to the model axes.

    `layers` stand in forward order. `styles` names the modules that `tp` cuts; a star stands
    for any layer's number. `limits` are those of the axes; `ep` cuts dim 0 of `experts`,
    parameters by the last parts of their names.
    """

    layers: tuple[Layer, ...]
    limits: Limits
    styles: Mapping[str, Style] = field(default_factory=dict)
    experts: tuple[str, ...] = ()


class Workload(Protocol):
    """One kind of training job. `Batch` is its own: whatever `read` gives and `loss` takes."""

    digest: str
    """Of the data: two runs with the same one read the same samples."""
    num_samples: int
    """How many samples one epoch has."""
    num_held_out: int
    """How many samples are held out for evaluation."""

    def module(self) -> nn.Module:
        """A new module; called under the meta device, so values given here are lost."""

    def blocks(self, module: nn.Module) -> Sequence[nn.Module]:
        """The parts that are sharded, compiled and checkpointed one by one, in forward order."""

    def shape(self) -> Shape:
        """How the model may be spread over pp, cp, tp and ep."""

    def fill(self, name: str, tensor: Tensor, generator: Generator) -> None:
        """Write a parameter's (or buffer's) values at step 0 into a whole float32 tensor."""

    def read(self, samples: Sequence[int], held_out: bool = False) -> Any:
        """The batch of these samples, in this order, on the host."""

    def empty(self) -> Any:
        """A batch whose loss is 0 and has gradient 0, as small as it may be."""

    def num_tokens(self, batch: Any) -> int:
        """How many losses the batch sums; what the whole step's gradient is divided by."""

    def loss(self, module: nn.Module, batch: Any, device: torch.device) -> Tensor:
        """The sum (never the mean) of a batch's losses."""

    def miniature(self) -> Workload:
        """The same with tiny dimensions and no data to open, for warming up."""
