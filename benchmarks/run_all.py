"""Runs every benchmark with `--check`, keeps the results in `results`, and writes the README anew.

Exit code 1 if a must is missed or a benchmark fails; the others run all the same. On a machine that
does nothing else.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time

from make_readme import FOLDER, NAMES, README, RESULTS, read_results, render

TIMEOUT_S = 3600.0


def run(name: str) -> str:
    """Run one; return what became of it."""
    command = [sys.executable, str(FOLDER / f"{name}.py"), "--check"]
    command += ["--json", str(RESULTS / f"{name}.json")]
    process = subprocess.Popen(command, cwd=FOLDER.parent)
    try:
        code = process.wait(TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.terminate()
        process.wait()
        return f"not finished after {TIMEOUT_S:.0f} s"
    if code == 0:
        return "all musts met"
    is_written = any(not must["met"] for must in read_results().get(name, {}).get("musts", []))
    return "a must is missed" if code == 1 and is_written else f"failed with exit code {code}"


def main() -> int:
    arguments = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    arguments.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)}")
    options = arguments.parse_args()
    unknown = set(options.names) - set(NAMES)
    if unknown:
        arguments.error(f"{', '.join(sorted(unknown))}: there are {', '.join(NAMES)}")
    outcomes: dict[str, str] = {}
    for name in options.names or NAMES:
        began = time.monotonic()
        print(f"== {name}", flush=True)
        outcomes[name] = run(name)
        print(f"== {name}: {outcomes[name]}, {time.monotonic() - began:.0f} s", flush=True)
    README.write_text(render(read_results()))
    for name, outcome in outcomes.items():
        print(f"{name}: {outcome}")
    return int(any(outcome != "all musts met" for outcome in outcomes.values()))


if __name__ == "__main__":
    sys.exit(main())
