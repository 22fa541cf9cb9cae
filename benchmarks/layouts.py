"""What a step costs under tp=2, pp=2 and fsdp=2, against plain loops with the same primitives.

How two are compared: `turns.py`. The bare loops, in `peers/`, start from the same values, read the
same samples, and must tell the same losses.
"""

from __future__ import annotations

import sys

from report import Must, conclude, console, parser
from turns import Comparison, compare

BATCHES = {"tp=2": 4, "pp=2": 8, "fsdp=2": 8}
"""Microbatches a step: so many that it takes 0.3 s or more, and a block not too long."""
SCRIPTS = {"tp=2": "bare_tp2", "pp=2": "bare_pp2", "fsdp=2": "bare_fsdp2"}
LARGEST_RATIO = 1.03
LARGEST_DIFFERENCE = 1e-5


def musts(layout: str, result: Comparison) -> list[Must]:
    """The ratio is missed only if the low end of its interval is above."""
    low, _ = result.interval
    return [
        Must(f"{layout}: low end of the ratio's interval", low, LARGEST_RATIO, ""),
        Must(f"{layout}: losses differ by", result.largest_difference, LARGEST_DIFFERENCE, ""),
    ]


def main() -> int:
    arguments = parser(__doc__.splitlines()[0])
    arguments.add_argument("--layouts", default=";".join(SCRIPTS), help="semicolons between")
    arguments.add_argument("--blocks", type=int, default=60, help="of each system")
    arguments.add_argument("--steps", type=int, default=3, help="in a block")
    arguments.add_argument("--data", default="")
    options = arguments.parse_args()
    layouts = [layout.strip() for layout in options.layouts.split(";")]
    unknown = [layout for layout in layouts if layout not in SCRIPTS]
    if unknown:
        arguments.error(f"{unknown[0]}: there are bare loops for {', '.join(SCRIPTS)}")
    bounds, num_failed = [], 0
    for layout in layouts:
        changes = ("--data", options.data, "--set", f"batch={BATCHES[layout]}")
        result = compare(layout, SCRIPTS[layout], changes, options.blocks, options.steps)
        if not result.pairs_s:
            console.print(f"{layout}: no pair of blocks was short enough to count")
            num_failed += 1
            continue
        result.show()
        bounds += musts(layout, result)
    return conclude(bounds, options.check) or min(num_failed, 1)


if __name__ == "__main__":
    sys.exit(main())
