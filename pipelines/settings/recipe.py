"""A recipe of one's own: any module, any data, as callables and plain values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import default_collate

from pipelines.settings.settings import TrainSettings

__all__ = ["Recipe", "TrainSettings"]

Losses = Tensor | tuple[Tensor, Tensor | int | float]
"""A scalar, the mean over the samples of a microbatch; or the sum of the losses of its parts, such
as tokens, and how many these are."""


class Dataset(Sized, Protocol):
    """Samples by number, as `torch.utils.data.Dataset` has them."""

    def __getitem__(self, index: int) -> Any: ...


def constant(step: int) -> float:
    """The schedule that leaves learning rates as they are."""
    return 1.0


@dataclass(frozen=True)
class Recipe:
    """What to train, as one would write it for one process.

    `model` makes the module. `loss` is called with it and a batch on its device. `optimizer` gets
    pairs (name, tensor), which torch's optimizers take, and steps whatever parts of parameters a
    worker has: what it does to an element may depend on that alone. `schedule` gives what every
    group's learning rate is multiplied by at a step, counted from 1. `data` and `held_out` open
    map-style datasets; `collate` makes a batch of a microbatch's samples. `evaluation` is the loss
    on held-out data, if it is another, and `metrics` are further numbers of them by name, each
    given as a loss is and with a forward pass of its own. `blocks` names the modules, or their
    classes, that are sharded one by one; by default those of the lists of modules of one class.
    `plan` says which linear layers and embeddings `tp` cuts, e.g. `{"layers.*.up": "colwise",
    "layers.*.down": "rowwise"}`, and `tp_divides` what it has to divide, e.g. the number of heads
    (None: what the widths that are cut have in common). `pipeline` names the blocks that `pp`
    deals to stages, in forward order, e.g. `["embed", "layers.*", "head"]`, a star being each
    number: the module's forward is to call each with what the one before gave, one tensor.

    `settings` are all the rest: `batch`, `microbatch`, `steps`, `seed`, `dtype`...; its `model`,
    `data` and `optimizer` mean nothing here.
    """

    model: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Any], Losses]
    optimizer: Callable[[Sequence[tuple[str, Tensor]]], Optimizer]
    data: Callable[[], Dataset]
    settings: TrainSettings = field(default_factory=TrainSettings)
    schedule: Callable[[int], float] = constant
    max_grad_norm: float | None = None
    held_out: Callable[[], Dataset] | None = None
    collate: Callable[[list[Any]], Any] = default_collate
    evaluation: Callable[[nn.Module, Any], Losses] | None = None
    metrics: Mapping[str, Callable[[nn.Module, Any], Losses]] = field(default_factory=dict)
    blocks: Sequence[str | type[nn.Module]] | None = None
    plan: Mapping[str, Literal["colwise", "rowwise"]] = field(default_factory=dict)
    tp_divides: int | None = None
    pipeline: Sequence[str] = ()
