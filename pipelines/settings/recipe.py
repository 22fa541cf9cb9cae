"""Custom recipes: any module and any data, as callables and plain values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import default_collate

from pipelines.settings.settings import TrainSettings

__all__ = ["Recipe", "TrainSettings"]

Losses = Tensor | tuple[Tensor, Tensor | int | float]
"""A scalar, the mean loss over the samples of a microbatch; or a pair (sum, count) of the losses
of its parts, such as tokens."""


class Dataset(Sized, Protocol):
    """A map-style dataset, as `torch.utils.data.Dataset` defines it: samples by index."""

    def __getitem__(self, index: int) -> Any: ...


def constant(step: int) -> float:
    """The schedule that leaves learning rates unchanged."""
    return 1.0


@dataclass(frozen=True)
class Recipe:
    """What to train, written as for one process.

    `model` builds the module. `loss` is called with the module and a batch on its device.
    `optimizer` gets pairs (name, tensor), as torch's optimizers accept them. It steps whatever
    shards of the parameters a worker holds, so its update of an element may depend on that
    element alone. `schedule` returns the factor of every group's learning rate at a step, counted
    from 1. `data` and `held_out` open map-style datasets. `collate` makes a batch from the samples
    of a microbatch.

    `evaluation` is the loss on held-out data, if it differs from `loss`. `metrics` are further
    functions of held-out data by name; each returns what a loss returns and makes its own forward
    pass. `blocks` are names or classes of the modules that are sharded one by one; the default is
    the children of each list of modules of one class.

    `plan` names the linear layers and embeddings that `tp` shards, e.g.
    `{"layers.*.up": "colwise", "layers.*.down": "rowwise"}`, or with torch's parallel styles, such
    as `ColwiseParallel()`. `tp` must divide `tp_divides`, e.g. the number of heads (None: the
    greatest common divisor of the sharded widths). `pipeline` names
    the blocks that `pp` distributes to stages, in forward order, e.g.
    `["embed", "layers.*", "head"]`; a star stands for each number. The module's forward must call
    each block with the output of the block before, one tensor.

    `sequence` says which dim of the tensors of a batch is the sequence, by their keys, e.g.
    `{"tokens": 1, "positions": 1, "targets": 1}`: `cp` gives each rank its part of these.

    `experts` names the modules whose experts `ep` deals to ranks, e.g. `["layers.*.experts"]`. Each
    is called with tokens (any, dim), the experts that each has chosen (any, k) and their weights
    (any, k), and returns (any, dim), as in `transformers`. Dim 0 of each of its parameters is the
    number of experts; an attribute `num_experts` becomes the number of this rank's.

    `begin_reader` is called in each reader process (`settings.reading.num_readers`) with its
    number, before the first sample, as torch's `worker_init_fn`.

    `settings` hold everything else: `batch`, `microbatch`, `steps`, `seed`, `dtype`... Their
    `model`, `data` and `optimizer` are ignored.
    """

    model: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Any], Losses]
    optimizer: Callable[[Sequence[tuple[str, Tensor]]], Optimizer]
    data: Callable[[], Dataset]
    settings: TrainSettings = field(default_factory=TrainSettings)
    schedule: Callable[[int], float] = constant
    max_grad_norm: float | None = None
    max_grad_value: float | None = None
    held_out: Callable[[], Dataset] | None = None
    collate: Callable[[list[Any]], Any] = default_collate
    evaluation: Callable[[nn.Module, Any], Losses] | None = None
    metrics: Mapping[str, Callable[[nn.Module, Any], Losses]] = field(default_factory=dict)
    blocks: Sequence[str | type[nn.Module]] | None = None
    plan: Mapping[str, Any] = field(default_factory=dict)
    tp_divides: int | None = None
    pipeline: Sequence[str] = ()
    sequence: Mapping[str | int, int] = field(default_factory=dict)
    experts: Sequence[str] = ()
    begin_reader: Callable[[int], None] | None = None
