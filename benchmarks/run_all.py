"""Runs all benchmarks with `--check`, stores the results in `results`, and regenerates the README.

Exit code 1 if a must is missed or a benchmark fails; the others run anyway. Use an otherwise idle
machine.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from make_readme import FOLDER, NAMES, README, RESULTS, read_results, render
from report import Must, write_result

TIMEOUT_S = 3600.0
END_PATIENCE_S = 30.0
"""The time that a terminated benchmark has to end its processes and remove its files."""
ALL_MET = "all musts met"


def run(
    program: Path,
    result: Path,
    timeout_s: float = TIMEOUT_S,
    end_patience_s: float = END_PATIENCE_S,
) -> str:
    """Run one benchmark and return its outcome. The result file is replaced: by the benchmark's, or
    by one that says how it failed."""
    result.unlink(missing_ok=True)
    began = time.monotonic()
    command = [sys.executable, str(program), "--check"]
    code: int | None = None
    process = subprocess.Popen([*command, "--json", str(result)], cwd=program.parent.parent)
    try:
        code = process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        outcome = f"not finished after {timeout_s:.0f} s"
        _end(process, end_patience_s)
    else:
        outcome = f"failed with exit code {code}"
    musts = _musts_in(result)
    if code == 0 and musts is not None:
        return ALL_MET
    if code == 1 and any(not must["met"] for must in musts or ()):
        return "a must is missed"
    outcome = "ended without a result" if code == 0 else outcome
    failed = Must(f"`{program.name} --check` {outcome}", 0, 1, "results", at_least=True)
    write_result(result, [failed], f"benchmarks/{program.name} --check", time.monotonic() - began)
    return outcome


def _musts_in(result: Path) -> list[dict[str, Any]] | None:
    """The musts in a result file; None if it is missing or incomplete."""
    try:
        musts: list[dict[str, Any]] = json.loads(result.read_text())["musts"]
    except (OSError, ValueError):
        return None
    return musts


def _end(process: subprocess.Popen[bytes], patience_s: float) -> None:
    process.terminate()
    try:
        process.wait(patience_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def main() -> int:
    arguments = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    arguments.add_argument("names", nargs="*", metavar="NAME", help=", ".join(NAMES))
    options = arguments.parse_args()
    unknown = set(options.names) - set(NAMES)
    if unknown:
        arguments.error(f"unknown: {', '.join(sorted(unknown))}; choose of {', '.join(NAMES)}")
    outcomes: dict[str, str] = {}
    for name in options.names or NAMES:
        began = time.monotonic()
        print(f"== {name}", flush=True)
        outcomes[name] = run(FOLDER / f"{name}.py", RESULTS / f"{name}.json")
        print(f"== {name}: {outcomes[name]}, {time.monotonic() - began:.0f} s", flush=True)
    README.write_text(render(read_results()))
    for name, outcome in outcomes.items():
        print(f"{name}: {outcome}")
    return int(any(outcome != ALL_MET for outcome in outcomes.values()))


if __name__ == "__main__":
    sys.exit(main())
