"""A multi-layer perceptron on random vectors, through the same seam as any other model."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional

from elastic.limits import Limits
from pipelines.settings import MlpSettings
from pipelines.training.seeds import keyed_generator
from pipelines.training.workload import Layer, Shape


class VectorBatch(NamedTuple):
    """Inputs (samples, first dim) and targets (samples, last dim), float32."""

    inputs: Tensor
    targets: Tensor


class Mlp(nn.Module):
    """Linear layers with ReLU between them."""

    def __init__(self, settings: MlpSettings) -> None:
        super().__init__()
        pairs = zip(settings.dims[:-1], settings.dims[1:-1], strict=False)
        self.layers = nn.ModuleList(nn.Linear(first, second) for first, second in pairs)
        self.output = nn.Linear(*settings.dims[-2:])

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = inputs.to(self.output.weight.dtype)
        for layer in self.layers:
            hidden = functional.relu(layer(hidden))
        return self.output(hidden)


class MlpWorkload:
    """Random vectors whose targets are a fixed nonlinear function of them."""

    def __init__(self, settings: MlpSettings, seed: int) -> None:
        self.settings = settings
        self.seed = seed
        self.digest = f"random vectors of seed {seed}"
        self.num_samples = settings.num_samples
        self.num_held_out = settings.num_samples

    def module(self) -> nn.Module:
        return Mlp(self.settings)

    def blocks(self, module: Mlp) -> Sequence[nn.Module]:
        return list(module.layers)

    def shape(self) -> Shape:
        """Layers for the pipeline; nothing here for the other model axes."""
        costs = [first * second for first, second in pairwise(self.settings.dims)]
        names = [*(f"layers.{i}" for i in range(len(costs) - 1)), "output"]
        layers = tuple(Layer((name,), cost) for name, cost in zip(names, costs, strict=True))
        return Shape(layers, Limits(tp_divides=1, num_layers=len(costs), seq_len=1, num_experts=1))

    def fill(self, name: str, tensor: Tensor, generator: Generator) -> None:
        if tensor.ndim == 1:
            tensor.zero_()
        else:
            nn.init.kaiming_uniform_(tensor, nonlinearity="relu", generator=generator)

    def read(self, samples: Sequence[int], held_out: bool = False) -> VectorBatch:
        inputs = torch.stack([self._vector(sample, held_out) for sample in samples])
        width = self.settings.dims[-1]
        repeats = -(-width // inputs.shape[1])
        return VectorBatch(inputs, inputs.sin().repeat(1, repeats)[:, :width])

    def empty(self) -> VectorBatch:
        first, last = self.settings.dims[0], self.settings.dims[-1]
        return VectorBatch(torch.empty(0, first), torch.empty(0, last))

    def num_tokens(self, batch: VectorBatch) -> int:
        return len(batch.inputs)

    def loss(self, module: nn.Module, batch: VectorBatch, device: torch.device) -> Tensor:
        """The squared error, averaged over the outputs of a sample, summed over samples."""
        predicted = module(batch.inputs.to(device))
        targets = batch.targets.to(device, predicted.dtype)
        return functional.mse_loss(predicted, targets, reduction="sum") / targets.shape[1]

    def miniature(self) -> MlpWorkload:
        return MlpWorkload(MlpSettings(dims=(8, 8, 8)), self.seed)

    def _vector(self, sample: int, held_out: bool) -> Tensor:
        split = "held out" if held_out else "training"
        generator = keyed_generator(split, self.seed, sample)
        return torch.randn(self.settings.dims[0], generator=generator)
