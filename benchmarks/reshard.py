"""Benchmark of resharding the state of a transformer: bytes, speed, memory.

Plain processes with Gloo on loopback execute the transfers that the product derives. The same
messages are replayed bare, alternating with the product. The same change of layout is also made by
saving and loading with torch.distributed.checkpoint (DCP) in a folder in memory.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from multiprocessing import set_forkserver_preload
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from report import Must, conclude, parser, show_table
from reshard_rank import HOST, KINDS, Job, Measured, Pair, Rounds, run_rank
from torch.multiprocessing import start_processes

from actors.distributed.exchange import AHEAD
from actors.distributed.store import open_store
from actors.distributed.transfer_windows import LARGEST_BYTES

PAIRS = {
    "dp-tp": Pair("dp=4", "tp=4"),
    "tp-pp": Pair("tp=4", "pp=4"),
    "fsdp-hsdp": Pair("fsdp=4", "dp=2,fsdp=2"),
    "pp-pp": Pair("pp=2", "pp=3"),
    "ep-ep": Pair("fsdp=4,ep=2", "fsdp=4,ep=4", has_experts=True),
    "shrink": Pair("fsdp=4", "fsdp=3"),
}
NUM_PROCESSES = 4
LEAST_RATIO = dict(zip(KINDS, (0.8, 0.6), strict=True))
SLACK_BYTES = 8 * 2**20
"""Allowance for the interpreter and Gloo."""
WINDOWS_BYTES = 2 * AHEAD * LARGEST_BYTES["cpu"]
"""The windows of all messages in flight, in both directions."""


def measure(pairs: Sequence[Pair], megabytes: int, rounds: int) -> list[Measured]:
    with TemporaryDirectory(prefix="reshard-") as name:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        set_forkserver_preload(["reshard_rank"])
        store = open_store(HOST)
        job = Job(tuple(pairs), megabytes, rounds, store.port, Path(name))
        start_processes(run_rank, (job,), NUM_PROCESSES, start_method="forkserver")
        results = [json.loads((Path(name) / f"{i}.json").read_text()) for i in range(len(pairs))]
    for result in results:
        result["kinds"] = {kind: Rounds(**rounds) for kind, rounds in result["kinds"].items()}
    return [Measured(**result) for result in results]


def show(pairs: Sequence[Pair], results: Sequence[Measured]) -> None:
    rows = []
    for pair, measured in zip(pairs, results, strict=True):
        move_s, dcp_s = median(measured.move_s), median(measured.dcp_s)
        rows.append(
            [
                str(pair),
                *(f"{b / 2**20:,.0f}" for b in (measured.state_bytes, measured.moved_bytes)),
                f"{surplus(measured):.2f}",
                *(against_bare(measured.kinds.get(kind)) for kind in KINDS),
                f"{move_s:.3f}",
                f"{dcp_s:.2f} ({dcp_s / move_s:.1f}x)",
                f"{memory(measured):.2f}",
            ]
        )
    columns = (
        "layouts",
        "state MB",
        "moved MB",
        "moved / bound",
        "one run: MB/s (of bare)",
        "packed: MB/s (of bare)",
        "move s",
        "DCP s",
        "memory / bound",
    )
    show_table("reshard", columns, rows)


def against_bare(rounds: Rounds | None) -> str:
    if rounds is None:
        return "-"
    rate = rounds.num_bytes / 2**20 / median(rounds.exchange_s)
    return f"{rate:,.0f} ({rounds.ratio:.2f})"


def surplus(measured: Measured) -> float:
    """Bytes moved over the lower bound."""
    if not measured.bound_bytes:
        return 1.0 if not measured.moved_bytes else float("inf")
    return measured.moved_bytes / measured.bound_bytes


def memory(measured: Measured) -> float:
    """Memory growth over its bound, of the process with the highest ratio."""
    return max(
        grown / (allowed + WINDOWS_BYTES + SLACK_BYTES) for grown, allowed in measured.host_bytes
    )


def musts(pairs: Sequence[Pair], results: Sequence[Measured]) -> list[Must]:
    bounds = []
    for pair, measured in zip(pairs, results, strict=True):
        bounds.append(Must(f"{pair}, bytes moved over the bound", surplus(measured), 1, "times"))
        for kind, rounds in measured.kinds.items():
            least = LEAST_RATIO[kind]
            bounds.append(Must(f"{pair}, {kind}, of bare Gloo", rounds.ratio, least, "times", True))
        ratio = median(d / m for d, m in zip(measured.dcp_s, measured.move_s, strict=True))
        bounds.append(Must(f"{pair}, faster than DCP", ratio, 3, "times", True))
        bounds.append(Must(f"{pair}, memory over the bound", memory(measured), 1, "times"))
    return bounds


def main() -> int:
    arguments = parser(__doc__.splitlines()[0])
    arguments.add_argument("--pairs", nargs="+", choices=PAIRS, default=list(PAIRS))
    arguments.add_argument("--megabytes", type=int, default=200)
    arguments.add_argument("--rounds", type=int, default=21)
    options = arguments.parse_args()
    pairs = [PAIRS[key] for key in options.pairs]
    results = measure(pairs, options.megabytes, options.rounds)
    show(pairs, results)
    return conclude(musts(pairs, results), options.check)


if __name__ == "__main__":
    sys.exit(main())
