"""Benchmark of a step under tp=2, pp=2 and fsdp=2, against bare loops with the same primitives.

Ours is a worker's step: compute, vote, apply. The bare loops, in `peers/`, start from the same
values, read the same samples, and must have the same losses. `overhead.py` measures what Ray and
the reports of the run cost in addition to the steps.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from multiprocessing import set_forkserver_preload
from pathlib import Path
from tempfile import TemporaryDirectory

from layouts_rank import Case, run_rank
from report import Must, conclude, parser
from torch.multiprocessing import start_processes
from turns import Comparison

from pipelines.run.recipes import byte_lm

BATCHES = {"tp=2": 4, "pp=2": 16, "fsdp=2": 8}
"""Microbatches in a step, chosen so that it takes about 0.3 s."""
SCRIPTS = {"tp=2": "bare_tp2", "pp=2": "bare_pp2", "fsdp=2": "bare_fsdp2"}
NUM_PROCESSES = 2
LARGEST_RATIO = 1.03
LARGEST_DIFFERENCE = 1e-5


def measure(cases: Sequence[Case]) -> list[Comparison]:
    with TemporaryDirectory(prefix="layouts-") as name:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        set_forkserver_preload(["layouts_rank"])
        job = tuple(cases), Path(name)
        start_processes(run_rank, job, NUM_PROCESSES, start_method="forkserver")
        measured = [json.loads((Path(name) / f"{case.layout}.json").read_text()) for case in cases]
    return [
        Comparison(f"byte_lm, {case.layout}, {case.script}.py", m["pairs_s"], m["losses"])
        for case, m in zip(cases, measured, strict=True)
    ]


def musts(layout: str, result: Comparison) -> list[Must]:
    """The requirements; the ratio is missed only if the low end of its interval is above."""
    low, _ = result.interval
    return [
        Must(f"{layout}: low end of the ratio's interval", low, LARGEST_RATIO, ""),
        Must(f"{layout}: losses differ by", result.largest_difference, LARGEST_DIFFERENCE, ""),
    ]


def main() -> int:
    arguments = parser(__doc__.splitlines()[0])
    arguments.add_argument("--layouts", nargs="+", choices=SCRIPTS, default=list(SCRIPTS))
    arguments.add_argument("--blocks", type=int, default=60, help="blocks of each system")
    arguments.add_argument("--steps", type=int, default=3, help="steps in a block")
    arguments.add_argument(
        "--sync-each-microbatch", action="store_true", help="unlike the bare loops"
    )
    options = arguments.parse_args()
    random = byte_lm().model_copy(
        update={
            "data": byte_lm().data.model_copy(update={"source": "random"}),
            "pass_samples": 1,  # the bare loops merge no microbatches either
            "eval_every": 0,
            "sync_each_microbatch": options.sync_each_microbatch,
        }
    )
    cases = [
        Case(
            layout,
            SCRIPTS[layout],
            random.model_copy(update={"batch": BATCHES[layout]}),
            options.blocks,
            options.steps,
        )
        for layout in options.layouts
    ]
    bounds = []
    for case, result in zip(cases, measure(cases), strict=True):
        result.show()
        bounds += musts(case.layout, result)
    return conclude(bounds, options.check)


if __name__ == "__main__":
    sys.exit(main())
