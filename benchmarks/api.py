"""What a step of examples/own_model.py costs through each form, against a bare DDP loop.

Each is a step as a worker makes it: compute, vote and apply. `ElasticTrainer` starts the very
workers that the command line does; what a run has beside its steps: `overhead.py`.
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
from report import Must, conclude, parser
from torch.multiprocessing import start_processes
from turns import Comparison

NUM_PROCESSES = 2
LARGEST_RATIO = 1.03
LARGEST_DIFFERENCE = 1e-5


def measure(num_blocks: int, num_steps: int, batch: int, microbatch: int) -> dict[str, Any]:
    with TemporaryDirectory(prefix="api-") as name:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        set_forkserver_preload(["api_rank"])
        job = NUM_PROCESSES, num_blocks, num_steps, batch, microbatch, Path(name)
        start_processes(run_rank, job, NUM_PROCESSES, start_method="forkserver")
        told: dict[str, Any] = json.loads((Path(name) / "told.json").read_text())
    return told


def main() -> int:
    arguments = parser(__doc__.splitlines()[0])
    arguments.add_argument("--blocks", type=int, default=60, help="of each form")
    arguments.add_argument("--steps", type=int, default=3, help="in a block")
    arguments.add_argument("--batch", type=int, default=1536, help="samples a step")
    arguments.add_argument("--microbatch", type=int, default=32, help="samples at once")
    options = arguments.parse_args()
    told = measure(options.blocks, options.steps, options.batch, options.microbatch)
    bounds = []
    for form in FORMS:
        pairs_s = [(one[form], one["bare"]) for one in told["times_s"]]
        losses = list(zip(told["losses"][form], told["losses"]["bare"], strict=True))
        result = Comparison(f"own_model, {form}, dp={NUM_PROCESSES}, bare_own.py", pairs_s, losses)
        result.show()
        low, _ = result.interval
        bounds += [
            Must(f"{form}: low end of the ratio's interval", low, LARGEST_RATIO, ""),
            Must(f"{form}: losses differ by", result.largest_difference, LARGEST_DIFFERENCE, ""),
        ]
    return conclude(bounds, options.check)


if __name__ == "__main__":
    sys.exit(main())
