"""Benchmark of the initial values of a 7 B transformer and of a custom module of 7 B parameters.

A rank of `fsdp=64` draws its regions of every parameter and creates its optimizer state, on one
core. Three ranks are timed. Nothing is trained.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from statistics import median

import torch
from report import Must, conclude, parser, show_table
from torch import nn

from elastic.geometry.layout import Layout
from elastic.geometry.shard_map import region_of
from pipelines.data.synthetic import RandomWindows
from pipelines.settings import TrainSettings, TransformerSettings
from pipelines.settings.recipe import Recipe
from pipelines.training.custom.custom_workload import CustomWorkload
from pipelines.training.models.language_model import LanguageModelWorkload
from pipelines.training.workload.state import initial_value, state_specs
from pipelines.training.workload.workload import Workload

SEVEN_B = TransformerSettings(
    vocab_size=32_000,
    dim=4096,
    num_layers=32,
    num_heads=32,
    num_kv_heads=32,
    hidden_dim=11_008,
)
MUST_S = 5.0


class Block(nn.Module):
    """A layer with the parameters of the transformer's layers."""

    def __init__(self) -> None:
        super().__init__()
        dim, hidden = SEVEN_B.dim, SEVEN_B.hidden_dim
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim, bias=False) for _ in range(4))
        self.up, self.gate = (nn.Linear(dim, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, dim, bias=False)
        self.norms = nn.ModuleList(nn.RMSNorm(dim) for _ in range(2))
        nn.init.trunc_normal_(self.down.weight, std=0.02, a=-0.04, b=0.04)


class CustomModule(nn.Module):
    """A user's module in plain PyTorch, with a non-persistent buffer of positions."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(SEVEN_B.vocab_size, SEVEN_B.dim)
        self.layers = nn.ModuleList(Block() for _ in range(SEVEN_B.num_layers))
        self.norm = nn.RMSNorm(SEVEN_B.dim)
        self.head = nn.Linear(SEVEN_B.dim, SEVEN_B.vocab_size, bias=False)
        angles = torch.outer(torch.arange(4096.0), torch.arange(64.0).neg().exp())
        self.register_buffer("cosines", angles.cos(), persistent=False)


def custom_recipe() -> Recipe:
    return Recipe(
        model=CustomModule,
        loss=lambda model, batch: model(batch),
        optimizer=lambda named: torch.optim.AdamW(named, lr=1e-4),
        data=lambda: [torch.zeros(1)],
    )


def main() -> int:
    arguments = parser(__doc__.splitlines()[0])
    arguments.add_argument("--shards", type=int, default=64)
    options = arguments.parse_args()
    torch.set_num_threads(1)
    samples = RandomWindows("train", 4, vocab_size=SEVEN_B.vocab_size, num_samples=8)
    settings = TrainSettings(model=SEVEN_B)
    makers: dict[str, Callable[[], Workload]] = {
        "transformer": lambda: LanguageModelWorkload(SEVEN_B, samples, None, torch.float32),
        "user's module": lambda: CustomWorkload(replace(custom_recipe(), settings=settings)),
    }
    musts = []
    for name, make in makers.items():
        seconds = median(draw_ranks(name, make, settings, options.shards))
        musts.append(Must(f"step 0 of a {name}, median of ranks", seconds, MUST_S))
    return conclude(musts, options.check)


def draw_ranks(
    name: str, make: Callable[[], Workload], settings: TrainSettings, num_shards: int
) -> list[float]:
    """The seconds of each of three ranks; for a custom module its constructor included."""
    specs, layout = state_specs(make(), settings), Layout(fsdp=num_shards)
    num_parameters = sum(
        torch.Size(spec.shape).numel() for spec in specs if spec.kind == "parameter"
    )
    rows, seconds = [], []
    for rank in (0, num_shards // 2, num_shards - 1):
        workload, num_elements = make(), 0
        began = time.perf_counter()
        for spec in specs:
            region = region_of(spec, layout, layout.coordinates(rank))
            assert region is not None
            value = initial_value(workload, settings, spec, region)
            num_elements += value.numel() if spec.kind == "parameter" else 0
        seconds.append(time.perf_counter() - began)
        peak_gb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
        rows.append([str(rank), f"{num_elements:,}", f"{seconds[-1]:.2f}", f"{peak_gb:.1f}"])
    title = f"step 0 of a {name}, {num_parameters / 1e9:.2f} B parameters, fsdp={num_shards}"
    show_table(title, ("world rank", "parameters drawn", "s on one core", "peak GB"), rows)
    return seconds


if __name__ == "__main__":
    sys.exit(main())
