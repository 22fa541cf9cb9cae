"""Benchmark of a step with vote, reports and MLflow on, against a bare FSDP2 loop.

`turns.py` says how the two are compared.
"""

from __future__ import annotations

import sys

from report import Must, conclude, parser
from turns import compare


def main() -> int:
    arguments = parser(__doc__.splitlines()[0])
    arguments.add_argument("--blocks", type=int, default=60, help="blocks of each system")
    arguments.add_argument("--steps", type=int, default=3, help="steps in a block")
    arguments.add_argument("--layout", default="fsdp=4")
    arguments.add_argument("--data", default="")
    options = arguments.parse_args()
    changes = ("--data", options.data)
    result = compare(options.layout, "bare_fsdp2", changes, options.blocks, options.steps)
    result.show()
    low, _ = result.interval
    return conclude([Must("low end of the ratio's interval", low, 1.02, "")], options.check)


if __name__ == "__main__":
    sys.exit(main())
