"""Benchmark of a step of examples/custom_model.py in each form, against a bare DDP loop.

A recipe and a custom training loop are measured by a worker's step (compute, vote, apply), which
alternates with the bare loop in the same processes. `ElasticTrainer` is a complete run on Ray that
alternates with torchrun.
"""

from __future__ import annotations

import json
import os
import sys
from multiprocessing import set_forkserver_preload
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from api_rank import FORMS, run_rank
from elastic_run import run_command
from peer_run import bare_own
from processes import python
from report import Must, conclude, parser
from torch.multiprocessing import start_processes
from turns import Comparison, side_by_side

NUM_PROCESSES = 2
LARGEST_RATIO = 1.03
LARGEST_DIFFERENCE = 1e-5


def measure(num_blocks: int, num_steps: int, batch: int, microbatch: int) -> dict[str, Any]:
    with TemporaryDirectory(prefix="api-") as name:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        set_forkserver_preload(["api_rank"])
        job = NUM_PROCESSES, num_blocks, num_steps, batch, microbatch, Path(name)
        start_processes(run_rank, job, NUM_PROCESSES, start_method="forkserver")
        measured: dict[str, Any] = json.loads((Path(name) / "results.json").read_text())
    return measured


def measure_trainer(num_blocks: int, num_steps: int, batch: int, microbatch: int) -> Comparison:
    """Measure `ElasticTrainer` in fewer and longer blocks, as Ray has to catch up after a stop."""
    numbers = str(batch), str(microbatch)
    script = Path(__file__).with_name("custom_trainer.py")
    with TemporaryDirectory(prefix="api-") as name:
        command = python(script, name, str(NUM_PROCESSES), *numbers)
        with run_command(command, Path(name)) as ours:
            return side_by_side(
                f"custom_model, ElasticTrainer, dp={NUM_PROCESSES}, torchrun bare_own.py",
                ours,
                NUM_PROCESSES,
                lambda: bare_own(NUM_PROCESSES, *numbers),
                num_blocks // 3,
                num_steps * 6,
            )


def main() -> int:
    arguments = parser(__doc__.splitlines()[0])
    arguments.add_argument("--blocks", type=int, default=60, help="blocks of each form")
    arguments.add_argument("--steps", type=int, default=3, help="steps in a block")
    arguments.add_argument("--batch", type=int, default=3072, help="samples in a step")
    arguments.add_argument("--microbatch", type=int, default=128, help="samples in a microbatch")
    options = arguments.parse_args()
    sizes = options.blocks, options.steps, options.batch, options.microbatch
    measured = measure(*sizes)
    results = {}
    for form in FORMS:
        pairs_s = [(times_s[form], times_s["bare"]) for times_s in measured["times_s"]]
        losses = list(zip(measured["losses"][form], measured["losses"]["bare"], strict=True))
        title = f"custom_model, {form}, dp={NUM_PROCESSES}, bare_own.py"
        results[form] = Comparison(title, pairs_s, losses)
    results["ElasticTrainer"] = measure_trainer(*sizes)
    bounds = []
    for form, result in results.items():
        result.show()
        low, _ = result.interval
        bounds += [
            Must(f"{form}: low end of the ratio's interval", low, LARGEST_RATIO, ""),
            Must(f"{form}: losses differ by", result.largest_difference, LARGEST_DIFFERENCE, ""),
        ]
    return conclude(bounds, options.check)


if __name__ == "__main__":
    sys.exit(main())
