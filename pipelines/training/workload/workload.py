"""The interface of a training job: module, loss and samples, independent of the layout."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from elastic.geometry.model_limits import Limits
from elastic.geometry.regions import Region
from pipelines.training.workload.optimizer import OptimizerFactory
from pipelines.training.workload.parallel_groups import ALONE, ParallelGroups

Style = Literal[
    "colwise",
    "colwise_gathered",
    "rowwise",
    "sequence",
    "gather",
    "vocabulary",
    "logits",
    "replicated",
    "partial",
]
"""How tensor parallelism treats a module: see `tensor_parallel` and, without
sequence parallelism, `pipelines.training.tensor.unsharded_hidden`."""


def no_substitute(lacking: nn.Module) -> None:
    """No substitute: a module that a stage lacks becomes None."""


def keep_module(module: nn.Module, layers: range) -> None:
    """Leave a module unchanged that already runs only the layers that it has."""


@dataclass(frozen=True, slots=True)
class Layer:
    """A part of a model that must lie on one pipeline stage: its module names, and its cost in
    multiplications per token, by which layers are assigned to stages."""

    modules: tuple[str, ...]
    cost: int


def starred(module: str) -> str:
    """A module's name with `*` for each number, as in parallel plans."""
    return re.sub(r"(?<![^.])\d+(?=\.|$)", "*", module)


@dataclass(frozen=True, slots=True)
class ModelShape:
    """How a model can be sharded over the model axes.

    - `layers`: the pipeline layers in forward order.
    - `limits`: the maximum degrees of the axes.
    - `styles`: the `tp` style by module name, where `*` matches any layer number; a name without
      stars comes first.
    - `experts`: the names of the modules of experts, whose parameters `ep` shards in dim 0; `*`
      matches any number.
    - `sequence_parallel`: if False, each `tp` rank has the hidden states of all tokens.
    - `make_substitute` makes the substitute for a module that a pipeline stage lacks.
    - `make_stage` makes a module run only the given layers.
    """

    layers: tuple[Layer, ...]
    limits: Limits
    styles: Mapping[str, Style] = field(default_factory=dict)
    experts: tuple[str, ...] = ()
    sequence_parallel: bool = True
    make_substitute: Callable[[nn.Module], nn.Module | None] = no_substitute
    make_stage: Callable[[nn.Module, range], None] = keep_module

    def style_of(self, module: str) -> Style | None:
        """How tensor parallelism treats the module of this name."""
        return self.styles.get(module) or self.styles.get(starred(module))

    def are_experts(self, module: str) -> bool:
        """Whether the module of this name is one of experts."""
        return module in self.experts or starred(module) in self.experts

    def belongs_to_experts(self, name: str) -> bool:
        """Whether a module or parameter is, or is in, a module of experts."""
        parts = name.split(".") if self.experts else []
        return any(self.are_experts(".".join(parts[: n + 1])) for n in range(len(parts)))


PADDING = -1
"""The seed of a padding microbatch."""


def at_least_float32(loss: Tensor) -> Tensor:
    """The loss in float32 or better, to be summed over a batch: bfloat16 has three digits."""
    return loss.float() if loss.dtype in (torch.bfloat16, torch.float16) else loss


def nothing() -> None:
    """The `interrupt` that never raises."""


class ModuleInputs(NamedTuple):
    """The tensors of one microbatch for a rank's module, on its device, with samples in dim 0.

    `inputs` go to the first pipeline stage, `keywords` (on the host) to every stage, `targets` to
    the loss.
    """

    inputs: Tensor
    keywords: dict[str, Tensor]
    targets: Tensor


class SeededSamples(NamedTuple):
    """The samples of one microbatch, the random seed of its computation, and that of its reading,
    which is the same in all steps of its batch."""

    seed: int
    samples: Sequence[int]
    reading_seed: int


def samples_in(parts: Sequence[SeededSamples]) -> list[int]:
    """The samples of several microbatches, in order."""
    return [sample for part in parts for sample in part.samples]


class LossSums(NamedTuple):
    """The loss sum and the number of tokens of a pass, as this rank counts them."""

    loss: Tensor
    num_tokens: Tensor


class OutputLoss(Protocol):
    """A loss that is a function of the module's output and the targets."""

    def num_tokens(self, targets: Tensor) -> Tensor:
        """The number of losses of these targets; the step's gradient is divided by their total."""

    def loss(self, output: Tensor, targets: Tensor, parallel: ParallelGroups) -> Tensor:
        """The sum (never the mean) of the losses, shape ()."""


Metric = Callable[[nn.Module, Any, ParallelGroups], LossSums]
"""A function of a module and of `Workload.feed`'s result, with the signature of `losses`."""


class CustomLoss(Protocol):
    """A loss that calls the module itself, so that a pipeline must be put in the module's place."""

    @property
    def flow(self) -> tuple[Tensor, ...]:
        """The input of each layer for a microbatch, and the last output, as meta tensors."""

    def loss_in(self, training: bool) -> Callable[[nn.Module, Any], Any]:
        """The loss of a module and a batch, for training or for evaluation."""

    def kinds(self, training: bool) -> Sequence[Metric]:
        """What is computed on a microbatch: the loss and, in evaluation, the metrics."""

    def begin_loss(self, fed: Any, training: bool) -> None:
        """Seed for a loss of this microbatch, if its draws depend on the blocks."""

    def begin_blocks(self, fed: Any, training: bool) -> None:
        """The blocks that are called next compute this microbatch."""

    def behind_blocks(self) -> None:
        """Seed for what the loss draws behind the last block."""

    def release(self) -> None:
        """Release the module's initial values: training has begun."""


class Workload(OutputLoss, Protocol):
    """One kind of training job.

    Its batch type is private: `read` returns it, `feed` takes it. So is the type of a microbatch:
    `feed` returns it (`ModuleInputs`, unless `custom_loss` is set), `losses` and `metrics` take it.
    """

    @property
    def digest(self) -> str:
        """A digest of the data: two runs with equal digests read the same samples."""

    @property
    def num_samples(self) -> int:
        """The number of samples in an epoch."""

    @property
    def num_held_out(self) -> int:
        """The number of held-out samples for evaluation."""

    @property
    def seq_len(self) -> int:
        """Tokens of a sample; 1 where samples are not sequences."""

    @property
    def optimizer_factory(self) -> OptimizerFactory | None:
        """The optimizer and its schedule; None: AdamW from the run's settings."""

    @property
    def whole_parameters(self) -> Collection[str]:
        """The parameters whose optimizer needs them whole, not parts of them; see `OwnedSharded`.

        It may take seconds once.
        """

    @property
    def metrics(self) -> Mapping[str, Metric]:
        """Evaluation metrics besides the loss, by name."""

    @property
    def has_constant_size(self) -> bool:
        """Whether microbatches always have full size, including those of `miniature` and
        `empty`."""

    @property
    def is_far(self) -> bool:
        """Whether samples must be fetched to this machine before they can be read."""

    @property
    def has_readers(self) -> bool:
        """Whether other processes read the training samples ahead."""

    @property
    def custom_loss(self) -> CustomLoss | None:
        """The loss for a pipeline, if it calls the module itself; None if it is `loss`."""

    @property
    def why_unmergeable(self) -> str | None:
        """Why several microbatches in one pass would not be the same computation; None if they may
        be. It may take seconds once. A pass that draws random numbers is found in the run."""

    @property
    def divides_draws(self) -> bool:
        """Whether a merged pass draws from torch's generators as single microbatches would; known
        from the same trial."""

    def module(self, parallel: ParallelGroups = ALONE) -> nn.Module:
        """Build a module. It is called under the meta device, so values set here are lost.

        A child that a pipeline stage lacks is None or, in a `ModuleDict`, missing.
        """

    def blocks(self, module: nn.Module) -> Sequence[nn.Module]:
        """The modules that are sharded, compiled and checkpointed one by one, in forward order."""

    def shape(self) -> ModelShape:
        """How the model can be sharded over pp, cp, tp and ep."""

    def limits(self) -> Limits:
        """The limits of `shape`, and what only a trial of the module finds out; it may take
        seconds."""

    def draw(
        self,
        name: str,
        shape: tuple[int, ...],
        region: Region,
        seed: int,
        interrupt: Callable[[], None] = nothing,
    ) -> Tensor:
        """Draw a region (on the host) of a parameter or buffer of this shape at step 0.

        The values of an element do not depend on the region. `interrupt` is called during the
        drawing and may raise.
        """

    def reach(self) -> None:
        """Check that the data can be read on this machine. Raises `UnsuitableMachine`."""

    def prefetch(self, samples: Sequence[int], held_out: bool = False) -> None:
        """Start to fetch samples that will be read soon; returns at once."""

    def read_ahead(self, passes: Iterable[Sequence[SeededSamples]]) -> None:
        """Read the coming training passes ahead, in this order, if processes are there for it."""

    def read(
        self,
        samples: Sequence[int],
        held_out: bool = False,
        interrupt: Callable[[], None] = nothing,
    ) -> Any:
        """The batch of these samples, in this order, on the host. It calls `interrupt`, which may
        raise, while it waits for samples."""

    def read_pass(
        self, parts: Sequence[SeededSamples], interrupt: Callable[[], None] = nothing
    ) -> Any:
        """The batch of all samples of a training pass. Randomness in the reading of a microbatch
        follows its seed."""

    def seed_forward(self, seed: int) -> None:
        """Seed the host's random generators for the forward of a pass that has been read, by the
        seed of its first microbatch; called after torch's generators have been seeded by it."""

    def empty(self, num_samples: int = 0, held_out: bool = False) -> Any:
        """A batch with loss 0 and gradient 0: `num_samples` samples of full size, or, for 0, a
        batch of the smallest size."""

    def feed(self, batch: Any, device: torch.device, parallel: ParallelGroups, *seeds: int) -> Any:
        """This rank's part of a batch. `seeds` are those of its microbatches, which have equal
        sizes; negative for padding."""

    def losses(self, module: nn.Module, fed: Any, parallel: ParallelGroups) -> LossSums:
        """Run `feed`'s result through a full module; return the sum and the number of losses.

        `output_losses` implements it with those of `OutputLoss`, which only a pipeline needs.
        """

    def flowing(self, layer: int, num_samples: int, parallel: ParallelGroups) -> Tensor:
        """A meta tensor like the input of a layer, or like the output of the last layer."""

    def miniature(self) -> Workload:
        """A workload of the same kind with tiny dimensions and no data to open, for warm-up."""


def forward_loss(
    workload: OutputLoss, module: nn.Module, fed: ModuleInputs, parallel: ParallelGroups = ALONE
) -> Tensor:
    """The loss sum of one microbatch through a full module."""
    return workload.loss(module(fed.inputs, **fed.keywords), fed.targets, parallel)


def output_losses(
    workload: OutputLoss, module: nn.Module, fed: ModuleInputs, parallel: ParallelGroups
) -> LossSums:
    """`Workload.losses` for a loss that is a function of the module's output and the targets."""
    return LossSums(forward_loss(workload, module, fed, parallel), workload.num_tokens(fed.targets))


def concatenate(microbatch_inputs: Sequence[ModuleInputs]) -> ModuleInputs:
    """Concatenate microbatches along dim 0; a keyword that some of them lack is 0 there."""
    if len(microbatch_inputs) == 1:
        return microbatch_inputs[0]
    examples = {name: value for fed in microbatch_inputs for name, value in fed.keywords.items()}
    keywords = {
        name: torch.cat(
            [fed.keywords.get(name, _zeros_like(examples[name], fed)) for fed in microbatch_inputs]
        )
        for name in examples
    }
    inputs, targets = (
        torch.cat(parts) for parts in zip(*[(f[0], f[2]) for f in microbatch_inputs], strict=True)
    )
    return ModuleInputs(inputs, keywords, targets)


def _zeros_like(value: Tensor, fed: ModuleInputs) -> Tensor:
    return value.new_zeros(len(fed.inputs), *value.shape[1:])
