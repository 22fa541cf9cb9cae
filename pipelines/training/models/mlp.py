"""The workload of a multi-layer perceptron on random vectors."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from elastic.geometry.model_limits import Limits
from elastic.geometry.regions import Region
from pipelines.settings import MlpSettings
from pipelines.training.workload.initial_values import Constant, draw, kaiming_uniform
from pipelines.training.workload.optimizer import OptimizerFactory
from pipelines.training.workload.parallel_groups import ALONE, ParallelGroups
from pipelines.training.workload.seeds import keyed_generator
from pipelines.training.workload.workload import (
    CustomLoss,
    Layer,
    LossSums,
    Metric,
    ModelShape,
    ModuleInputs,
    SeededSamples,
    nothing,
    output_losses,
    samples_in,
)


class VectorBatch(NamedTuple):
    """Inputs (samples, first dim) and targets (samples, last dim), float32."""

    inputs: Tensor
    targets: Tensor


class Mlp(nn.Module):
    """Linear layers with ReLU between them, or a pipeline stage of them."""

    def __init__(self, settings: MlpSettings) -> None:
        super().__init__()
        *hidden, last = (nn.Linear(first, second) for first, second in pairwise(settings.dims))
        self.layers = nn.ModuleDict({str(i): layer for i, layer in enumerate(hidden)})
        self.output = last

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.layers.values():
            hidden = functional.relu(layer(hidden))
        if self.output is not None:
            hidden = self.output(hidden)
        return hidden


class MlpWorkload:
    """Regression of a fixed nonlinear function of random vectors."""

    custom_loss: CustomLoss | None = None
    why_unmergeable: str | None = None
    whole_parameters: Collection[str] = ()
    divides_draws = False

    def __init__(
        self, settings: MlpSettings, seed: int, dtype: torch.dtype = torch.float32
    ) -> None:
        self.settings = settings
        self.seed = seed
        self.dtype = dtype
        self.digest = f"random vectors of seed {seed}"
        self.num_samples = settings.num_samples
        self.num_held_out = settings.num_samples
        self.seq_len = 1
        self.is_far = False
        self.has_readers = False
        self.optimizer_factory: OptimizerFactory | None = None
        self.metrics: dict[str, Metric] = {}
        self.has_constant_size = False

    def module(self, parallel: ParallelGroups = ALONE) -> nn.Module:
        return Mlp(self.settings)

    def blocks(self, module: nn.Module) -> Sequence[nn.Module]:
        return list(module.get_submodule("layers").children())

    def shape(self) -> ModelShape:
        """Pipeline layers; the other model axes are not supported."""
        costs = [first * second for first, second in pairwise(self.settings.dims)]
        names = [*(f"layers.{i}" for i in range(len(costs) - 1)), "output"]
        layers = tuple(Layer((name,), cost) for name, cost in zip(names, costs, strict=True))
        return ModelShape(
            layers, Limits(tp_divides=1, num_layers=len(costs), seq_len=1, num_experts=1)
        )

    def limits(self) -> Limits:
        return self.shape().limits

    def draw(
        self,
        name: str,
        shape: tuple[int, ...],
        region: Region,
        seed: int,
        interrupt: Callable[[], None] = nothing,
    ) -> Tensor:
        distribution = Constant(0.0) if len(shape) == 1 else kaiming_uniform(shape[1])
        return draw(distribution, name, seed, shape, region, interrupt)

    def reach(self) -> None:
        """The samples are generated locally."""

    def read_ahead(self, passes: Iterable[Sequence[SeededSamples]]) -> None:
        """Nothing to do: reading is fast."""

    def prefetch(self, samples: Sequence[int], held_out: bool = False) -> None:
        """The samples are generated locally."""

    def read(
        self,
        samples: Sequence[int],
        held_out: bool = False,
        interrupt: Callable[[], None] = nothing,
    ) -> VectorBatch:
        inputs = torch.stack([self._vector(sample, held_out) for sample in samples])
        width = self.settings.dims[-1]
        repeats = -(-width // inputs.shape[1])
        return VectorBatch(inputs, inputs.sin().repeat(1, repeats)[:, :width])

    def read_pass(
        self, parts: Sequence[SeededSamples], interrupt: Callable[[], None] = nothing
    ) -> VectorBatch:
        return self.read(samples_in(parts), interrupt=interrupt)

    def seed_forward(self, seed: int) -> None:
        """Nothing to do: reading draws from generators of its own."""

    def empty(self, num_samples: int = 0, held_out: bool = False) -> VectorBatch:
        first, last = self.settings.dims[0], self.settings.dims[-1]
        missing = torch.full((num_samples, last), torch.nan)
        return VectorBatch(torch.zeros(num_samples, first), missing)

    def feed(
        self, batch: VectorBatch, device: torch.device, parallel: ParallelGroups, *seeds: int
    ) -> ModuleInputs:
        return ModuleInputs(
            batch.inputs.to(device, self.dtype), {}, batch.targets.to(device, self.dtype)
        )

    def losses(self, module: nn.Module, fed: ModuleInputs, parallel: ParallelGroups) -> LossSums:
        return output_losses(self, module, fed, parallel)

    def num_tokens(self, targets: Tensor) -> Tensor:
        return (~targets[:, 0].isnan()).sum()

    def loss(self, output: Tensor, targets: Tensor, parallel: ParallelGroups) -> Tensor:
        """The squared error, averaged over the outputs of a sample, summed over samples."""
        targets_or_output = torch.where(targets.isnan(), output.detach(), targets)
        return functional.mse_loss(output, targets_or_output, reduction="sum") / targets.shape[1]

    def flowing(self, layer: int, num_samples: int, parallel: ParallelGroups) -> Tensor:
        shape = (num_samples, self.settings.dims[layer])
        return torch.empty(shape, dtype=self.dtype, device="meta", requires_grad=layer > 0)

    def miniature(self) -> MlpWorkload:
        return MlpWorkload(MlpSettings(dims=(8, 8, 8)), self.seed, self.dtype)

    def _vector(self, sample: int, held_out: bool) -> Tensor:
        split = "held out" if held_out else "training"
        generator = keyed_generator(split, self.seed, sample)
        return torch.randn(self.settings.dims[0], generator=generator)
