"""Goodput on recorded traces of spot machines, by `elastic simulate`, beside restart-based systems.

    python benchmarks/goodput.py --traces FOLDER --check

The folder has `bamboo-p3.csv` (github.com/uclasystem/bamboo, traces/p3-trace.csv), `parcae-hh.txt`
and `parcae-ll.txt` (github.com/JF-D/Parcae, aws/traces/bert). A loss is detected in 0.05 s,
as that of a process whose connections close; the second row of a trace has the 4 s that a machine
needs which vanishes silently. The other costs are those of docs/simulate.md.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from report import Must, conclude, parser, show_table

P3 = "AWS p3 (Bamboo)"
TRACES_FOLDER = Path(__file__).parent / "traces"
DETECTIONS = {"": "0.05", ", vanished silently": "4"}
"""The seconds until a loss is detected, by what the table says of it."""


class Trace(NamedTuple):
    """What `elastic simulate` gets: a file of the folder, or the settings of a generated trace."""

    name: str
    file: str = ""
    generate: str = ""


TRACES = (
    Trace(P3, file="bamboo-p3.csv"),
    Trace(
        "a generated trace",
        generate="nodes=24,hours=12,mtbf_h=10,rack=4,correlated=0.3,replace_s=400,"
        "capacity_least=12,capacity_every_h=2",
    ),
    Trace("Parcae HH", file="parcae-hh.txt"),
    Trace("Parcae LL", file="parcae-ll.txt"),
)
COLUMNS = ("trace", "system", "goodput", "capacity used", "redone", "pauses", "median pause s")


def simulate(trace: Trace, folder: Path, detect_s: str) -> dict[str, Any]:
    """The results of one trace, as the command writes them."""
    source = ["--generate", trace.generate] if trace.generate else [str(folder / trace.file)]
    with tempfile.TemporaryDirectory() as place:
        results = Path(place) / "results.json"
        options = ["--cost", f"detect_s={detect_s}", "--json", str(results)]
        command = [sys.executable, "-m", "pipelines", "simulate", *source, *options]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        written: dict[str, Any] = json.loads(results.read_text())
        return written


def row_of(name: str, system: str, result: dict[str, Any]) -> list[str]:
    return [
        name,
        system,
        f"{result['goodput']:.2%}",
        f"{result['capacity_used']:.2%}",
        f"{result['steps_redone']:,}",
        f"{result['pauses']}",
        f"{result['median_pause_s']:.1f}",
    ]


def main() -> int:
    arguments = parser(__doc__ or "")
    arguments.add_argument(
        "--traces", type=Path, default=TRACES_FOLDER, help="the folder of the recorded traces"
    )
    options = arguments.parse_args()
    rows: list[list[str]] = []
    seconds: dict[str, float] = {}
    p3: dict[str, Any] = {}
    for trace in TRACES:
        for said, detect_s in DETECTIONS.items():
            began = time.monotonic()
            ours, *others = simulate(trace, options.traces, detect_s)["systems"]
            seconds.setdefault(trace.name, time.monotonic() - began)
            rows.append(row_of(trace.name, f"ours{said}", ours))
            if not said:
                reference = others
                p3 = ours if trace.name == P3 else p3
        rows += [row_of(trace.name, other["system"], other) for other in reference]
    show_table("Goodput in simulated time", COLUMNS, rows)
    musts = [
        Must(f"{P3}: seconds to simulate it", seconds[P3], 60),
        Must(f"{P3}: goodput", p3["goodput"] * 100, 99.0, "%", at_least=True),
        Must(f"{P3}: capacity used", p3["capacity_used"] * 100, 95.0, "%", at_least=True),
    ]
    return conclude(musts, options.check)


if __name__ == "__main__":
    sys.exit(main())
