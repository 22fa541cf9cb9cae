"""What is trained: a module, its loss and its samples, without a word of how it is spread."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from elastic.geometry.model_limits import Limits
from elastic.geometry.regions import Region
from pipelines.training.workload.optimizer import Optimizing
from pipelines.training.workload.spread import ALONE, Spread

Style = Literal[
    "colwise", "rowwise", "sequence", "gather", "vocabulary", "logits", "replicated", "partial"
]
"""How tensor parallelism treats a module: see `tensor_parallel` and, without
sequence parallelism, `pipelines.training.tensor.unsharded_hidden`."""


def no_module(lacking: nn.Module) -> None:
    """Nothing stands in for a module."""


def as_it_is(module: nn.Module, layers: range) -> None:
    """A module that goes through the layers that it has needs nothing."""


@dataclass(frozen=True, slots=True)
class Layer:
    """A part of a model that lies on one pipeline stage: its modules by name, and its cost
    in multiplications a token, by which layers are dealt to stages."""

    modules: tuple[str, ...]
    cost: int


def starred(module: str) -> str:
    """The name of a module with a star for each number, as plans have it."""
    return re.sub(r"(?<![^.])\d+(?=\.|$)", "*", module)


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What a model offers to the model axes.

    `layers` stand in forward order. `styles` names the modules that `tp` cuts; a star stands
    for any layer's number. `limits` are those of the axes. `experts` are the last parts of the
    names of the parameters that `ep` cuts, in dim 0. Without `sequence_parallel` each rank of `tp`
    has the hidden states of all tokens. `stand_in` makes what a pipeline stage has in the place of
    a module that it lacks, and `make_stage` makes a module that has only some layers run those.
    """

    layers: tuple[Layer, ...]
    limits: Limits
    styles: Mapping[str, Style] = field(default_factory=dict)
    experts: tuple[str, ...] = ()
    sequence_parallel: bool = True
    stand_in: Callable[[nn.Module], nn.Module | None] = no_module
    make_stage: Callable[[nn.Module, range], None] = as_it_is

    def style_of(self, module: str) -> Style | None:
        """How tensor parallelism treats the module of this name."""
        return self.styles.get(starred(module))


PADDING = -1
"""The seed of a microbatch that only pads."""


def at_least_float32(loss: Tensor) -> Tensor:
    """What is summed over a batch: bfloat16 has three digits."""
    return loss.float() if loss.dtype in (torch.bfloat16, torch.float16) else loss


def nothing() -> None:
    """Nobody interrupts."""


class Fed(NamedTuple):
    """What one microbatch feeds to a rank's module, on its device, the samples in dim 0.

    `inputs` go to the first stage of a pipeline, `keywords` (on the host) to each, `targets` to
    the loss.
    """

    inputs: Tensor
    keywords: dict[str, Tensor]
    targets: Tensor


class Sums(NamedTuple):
    """The loss and the number of tokens of a microbatch, as far as this rank counts them."""

    loss: Tensor
    num_tokens: Tensor


class Workload(Protocol):
    """One kind of training job. `Batch` is its own: whatever `read` gives and `feed` takes."""

    digest: str
    """Of the data: two runs with the same one read the same samples."""
    num_samples: int
    """How many samples one epoch has."""
    num_held_out: int
    """How many samples are held out for evaluation."""
    seq_len: int
    """Tokens of a sample; 1 where samples are no sequences."""

    optimising: Optimizing | None
    """How its parameters are stepped; None: with AdamW, as the run's settings say."""

    metrics: Mapping[str, Callable[[nn.Module, Any, Spread], Sums]]
    """What is evaluated beside the loss, by name; each is made as `losses` are."""

    keeps_its_size: bool
    """Whether microbatches are always whole: also those of `miniature`, and of `empty`."""

    is_far: bool
    """Whether samples have to be brought to this machine before they can be read."""

    def module(self, spread: Spread = ALONE) -> nn.Module:
        """A new module; called under the meta device, so values given here are lost.

        A child that a pipeline stage lacks is None or, in a `ModuleDict`, missing.
        """

    def blocks(self, module: nn.Module) -> Sequence[nn.Module]:
        """The parts that are sharded, compiled and checkpointed one by one, in forward order."""

    def shape(self) -> ModelShape:
        """How the model may be spread over pp, cp, tp and ep."""

    def draw(
        self,
        name: str,
        shape: tuple[int, ...],
        region: Region,
        seed: int,
        interrupt: Callable[[], None] = nothing,
    ) -> Tensor:
        """A region (on the host) of a parameter or buffer of this shape at step 0: the same values
        whatever the other regions are. `interrupt` may raise, and is called while it draws."""

    def reach(self) -> None:
        """See that the data can be read on this machine. Raises `UnfitMachine`."""

    def prefetch(self, samples: Sequence[int], held_out: bool = False) -> None:
        """These samples will be read soon; returns at once."""

    def read(
        self,
        samples: Sequence[int],
        held_out: bool = False,
        interrupt: Callable[[], None] = nothing,
    ) -> Any:
        """The batch of these samples, in this order, on the host; who has to wait for them calls
        `interrupt`, which may raise."""

    def empty(self, num_samples: int = 0, held_out: bool = False) -> Any:
        """A batch whose loss is 0 and has gradient 0: so many samples of full size, or, for 0,
        one as small as it may be."""

    def feed(self, batch: Any, device: torch.device, spread: Spread, seed: int) -> Fed:
        """This rank's part of a batch. `seed` is the microbatch's, negative for one that only
        pads."""

    def losses(self, module: nn.Module, fed: Any, spread: Spread) -> Sums:
        """The sum of the losses of what `feed` gave, through a whole module, and how many they
        are; `output_losses` makes it of `loss` and `num_tokens`, which only a pipeline needs."""

    def num_tokens(self, targets: Tensor) -> Tensor:
        """How many losses these targets sum; what the whole step's gradient is divided by."""

    def loss(self, output: Tensor, targets: Tensor, spread: Spread) -> Tensor:
        """The sum (never the mean) of the losses, shape ()."""

    def flowing(self, layer: int, num_samples: int, spread: Spread) -> Tensor:
        """What a rank passes into a layer, or out of the last, as a tensor on the meta device."""

    def miniature(self) -> Workload:
        """The same with tiny dimensions and no data to open, for warming up."""


def forward_loss(workload: Workload, module: nn.Module, fed: Fed, spread: Spread = ALONE) -> Tensor:
    """The loss of one microbatch through a whole module."""
    return workload.loss(module(fed.inputs, **fed.keywords), fed.targets, spread)


def output_losses(workload: Workload, module: nn.Module, fed: Fed, spread: Spread) -> Sums:
    """`Workload.losses` where the loss is a function of the module's output and the targets."""
    return Sums(forward_loss(workload, module, fed, spread), workload.num_tokens(fed.targets))


def joined(feds: Sequence[Fed]) -> Fed:
    """Several in a row; keywords that one lacks and others have are 0."""
    if len(feds) == 1:
        return feds[0]
    known = {name: value for fed in feds for name, value in fed.keywords.items()}
    keywords = {
        name: torch.cat([fed.keywords.get(name, _nothing_like(known[name], fed)) for fed in feds])
        for name in known
    }
    inputs, targets = (
        torch.cat(parts) for parts in zip(*[(f[0], f[2]) for f in feds], strict=True)
    )
    return Fed(inputs, keywords, targets)


def _nothing_like(value: Tensor, fed: Fed) -> Tensor:
    return value.new_zeros(len(fed.inputs), *value.shape[1:])
