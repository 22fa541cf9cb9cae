"""Step 0 of a 7 B transformer, and what a rank asks storage for when it restores.

Each rank of `fsdp=64` draws its own regions of every parameter and makes its optimizer state, on
one core; three ranks are timed. Nothing is trained.
"""

from __future__ import annotations

import sys
import time
from statistics import median

import torch
from report import Must, conclude, parser, show_table

from elastic.layout import Layout
from elastic.shards import region_of
from pipelines.data.synthetic import RandomWindows
from pipelines.settings import TrainSettings, TransformerSettings
from pipelines.training.language_model import LanguageModelWorkload
from pipelines.training.state import initial_value, state_specs

SEVEN_B = TransformerSettings(
    vocab_size=32_000,
    dim=4096,
    num_layers=32,
    num_heads=32,
    num_kv_heads=32,
    hidden_dim=11_008,
)
MUST_S = 5.0


def main() -> int:
    arguments = parser(__doc__.splitlines()[0])
    arguments.add_argument("--shards", type=int, default=64)
    options = arguments.parse_args()
    torch.set_num_threads(1)
    samples = RandomWindows("train", 4, vocab_size=SEVEN_B.vocab_size, num_samples=8)
    workload = LanguageModelWorkload(SEVEN_B, samples, None, torch.float32)
    settings = TrainSettings(model=SEVEN_B)
    specs = state_specs(workload, settings)
    layout = Layout(fsdp=options.shards)
    num_parameters = sum(
        torch.Size(spec.shape).numel() for spec in specs if spec.kind == "parameter"
    )
    rows, seconds = [], []
    for rank in (0, options.shards // 2, options.shards - 1):
        began, num_elements = time.perf_counter(), 0
        for spec in specs:
            region = region_of(spec, layout, layout.coordinates(rank))
            assert region is not None
            value = initial_value(workload, settings, spec, region)
            num_elements += value.numel() if spec.kind == "parameter" else 0
        seconds.append(time.perf_counter() - began)
        rows.append([str(rank), f"{num_elements:,}", f"{seconds[-1]:.2f}"])
    title = f"step 0 of {num_parameters / 1e9:.2f} B parameters, fsdp={options.shards}, one core"
    show_table(title, ("world rank", "parameters drawn", "s"), rows)
    return conclude([Must("step 0, median of ranks", median(seconds), MUST_S)], options.check)


if __name__ == "__main__":
    sys.exit(main())
