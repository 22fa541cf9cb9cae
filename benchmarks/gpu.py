"""Measures this project on a machine with GPUs and writes docs/gpu.md: `make gpu` runs it.

It needs no Ray. With `--device cpu` it tries itself with a small model on Gloo, and writes nothing.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from datetime import date
from pathlib import Path
from textwrap import wrap
from typing import Any, NamedTuple

import gpu_groups
import gpu_reshard
import gpu_runs
import gpu_step
import torch
from make_readme import table
from processes import Failed
from report import commit, console, machine

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "gpu.md"
RECORDED = Path(__file__).parent / "gpu_recorded.json"
NOT_RUN = "not run"
TESTS_TIMEOUT_S = 1800.0
Measured = dict[str, Any]


class Row(NamedTuple):
    """A line of the page; `value` raises KeyError if its part was not measured."""

    what: str
    value: Callable[[Measured], str]
    must: str = ""


def _ms(part: str, key: str) -> Callable[[Measured], str]:
    return lambda measured: f"{1000 * measured[part][key]:.1f} ms"


def _speed(key: str) -> Callable[[Measured], str]:
    return lambda m: f"{m['reshard']['bytes'] / m['reshard'][key] / 1e9:.2f} GB/s each way"


def _tokens(part: str, key: str) -> Callable[[Measured], str]:
    return lambda m: f"{m[part]['tokens_a_step'] / m[part][key]:,.0f}"


def _ratio(part: str) -> Callable[[Measured], str]:
    return lambda m: f"{m[part]['bare_s'] / m[part]['ours_s']:.3f}"


def _mfu(part: str) -> Callable[[Measured], str]:
    def utilization(measured: Measured) -> str:
        step = measured[part]
        if not step["peak_flops"]:
            return "the peak of this device is not known"
        return f"{step['step_flops'] / step['ours_s'] / step['peak_flops']:.1%}"

    return utilization


def _gib(part: str, key: str) -> Callable[[Measured], str]:
    return lambda m: f"{m[part][key] / 2**30:.2f} GiB"


ROWS = (
    Row("processes whose groups are formed", lambda m: f"{m['groups']['num_ranks']:.0f}"),
    Row("forming the first groups", _ms("groups", "first_form_s")),
    Row("forming groups again", _ms("groups", "form_s")),
    Row("the first collective in them", _ms("groups", "collective_s")),
    Row("abort of a blocked collective", _ms("groups", "abort_s")),
    Row("the slowest of 20 aborts", _ms("groups", "slowest_abort_s")),
    Row("a reshard of 2 GiB between two processes", _speed("ours_s"), "0.8 of bare"),
    Row("bare messages of the same bytes", _speed("bare_s")),
    Row(
        "device memory for it beside the old and the new state",
        lambda m: f"{m['reshard']['extra_bytes'] / 2**20:.0f} MiB",
    ),
    Row("parameters of the transformer", lambda m: f"{m['step']['num_params'] / 1e9:.2f} B"),
    Row("tokens/s, ours", _tokens("step", "ours_s")),
    Row("tokens/s, bare loop", _tokens("step", "bare_s")),
    Row("ours / bare", _ratio("step"), "0.99"),
    Row("model FLOPs utilization", _mfu("step"), "45 %"),
    Row("tokens/s with compile=true, ours", _tokens("compiled", "ours_s")),
    Row("tokens/s with compiled blocks, bare loop", _tokens("compiled", "bare_s")),
    Row("ours / bare, both compiled", _ratio("compiled"), "0.99"),
    Row("model FLOPs utilization with compile=true", _mfu("compiled"), "45 %"),
    Row("weights, gradients, optimizer", _gib("step", "state_bytes")),
    Row("most memory allocated", _gib("step", "peak_bytes")),
    Row("the same, predicted by the memory model", _gib("step", "predicted_bytes")),
    Row("step of 150 M parameters without copies", _ms("stalls", "without_copies_s")),
    Row("the same with a snapshot of each step", _ms("stalls", "with_snapshots_s")),
    Row(
        "what a checkpoint adds to the step in which it begins", _ms("stalls", "checkpoint_stall_s")
    ),
    Row("workers of the run with kills", lambda m: f"{m['kills']['num_workers']:.0f}"),
    Row("from SIGKILL to the next step", _ms("kills", "recovery_s"), "2 s on 8 GPUs"),
    Row("the slowest of these", _ms("kills", "slowest_recovery_s")),
    Row(
        "survivors lost",
        lambda m: f"{m['kills']['num_survivors_lost']} in {m['kills']['num_kills']} kills",
        "0 in 100",
    ),
    Row("tests/gpu", lambda m: str(m["tests"])),
)


def render(measured: Measured) -> str:
    """The page; what was not measured says so."""
    begin = UNMEASURED
    if measured:
        begin = f"{measured['date']}, commit {measured['commit']}, {measured['machine']}."
        begin = "\n".join(wrap(f"{begin} {measured.get('remark', '')}", 106))
    rows = [[row.what, _value(row, measured), row.must] for row in ROWS]
    return PAGE_TEXT.format(begin=begin, table=table(["", "measured", "must be"], rows))


UNMEASURED = (
    "**Not run**: no GPU has executed any part of this project yet. The GPU paths are tested on "
    "CPUs, with\na fake of NCCL's library where they need one."
)
PAGE_TEXT = """# On a GPU

    make gpu

After this page you know what has been measured on GPUs, and how to measure your own.

{begin}

The command runs [tests/gpu](../tests/gpu), measures the following on this machine, with one GPU
or more, and writes this page. It needs no Ray. Processes that share a GPU are separate hosts for
NCCL, and communicate through sockets.

{table}

A part that fails is named in its rows. [watching.md](watching.md) says what a run does about a
broken GPU.
"""


def _value(row: Row, measured: Measured) -> str:
    failures = measured.get("failures", {})
    try:
        return row.value(measured)
    except KeyError as missing:
        return str(failures.get(missing.args[0], NOT_RUN))


def measure(device: str, num_kills: int) -> Measured:
    """All parts; one that fails does not keep the others from being measured."""
    changes = gpu_runs.LARGE if device == "cuda" else ()
    parts: dict[str, Callable[[], Any]] = {
        "groups": lambda: gpu_groups.measure(device),
        "reshard": lambda: gpu_reshard.measure(device, 2**31 if device == "cuda" else 2**24),
        "step": lambda: gpu_step.measure(device),
        "compiled": lambda: gpu_step.measure(device, compiled=True),
        "stalls": lambda: gpu_runs.measure_stalls(device, changes),
        "kills": lambda: gpu_runs.measure_kills(device, changes, num_kills),
    }
    if device == "cuda":
        parts["tests"] = _run_tests
    measured: Measured = {"date": str(date.today()), "commit": commit(), "machine": machine()}
    failures: dict[str, str] = {}
    for name, part in parts.items():
        console.print(f"measuring {name}")
        try:
            measured[name] = part()
        except Exception as error:
            console.print_exception()
            failures[name] = f"failed: {type(error).__name__}: {_last_line(str(error))}"
        console.print(str(measured.get(name, failures.get(name))), markup=False)
    return {**measured, "failures": failures}


def _last_line(text: str) -> str:
    """The line that says what failed: the last one of a traceback."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:200] if lines else ""


def _run_tests() -> str:
    """The last line of pytest's output. Raises `Failed` if a test fails."""
    options = ("-q", "-p", "no:xdist", "-o", "addopts=")
    command = [sys.executable, "-m", "pytest", *options, "tests/gpu"]
    done = subprocess.run(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=TESTS_TIMEOUT_S,
    )
    console.print(done.stdout[-5000:], markup=False)
    if done.returncode:
        raise Failed(_last_line(done.stdout))
    return _last_line(done.stdout).strip("= ")


def main() -> int:
    arguments = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    arguments.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    arguments.add_argument("--kills", type=int, help="default: 5, or 100 with several GPUs")
    arguments.add_argument("--page-only", action="store_true", help="write the page again")
    options = arguments.parse_args()
    if options.page_only:
        PAGE.write_text(render(recorded()))
        return 0
    if options.device == "cuda" and not torch.cuda.is_available():
        console.print("make gpu: torch sees no GPU here; see `elastic doctor`")
        return 2
    several = options.device == "cuda" and torch.cuda.device_count() > 1
    num_kills = (100 if several else 5) if options.kills is None else options.kills
    measured = measure(options.device, num_kills)
    console.print(render(measured), soft_wrap=True)
    if options.device == "cuda":
        RECORDED.write_text(json.dumps(measured, indent=1) + "\n")
        PAGE.write_text(render(measured))
    return int(bool(measured["failures"]))


def recorded() -> Measured:
    """The newest measurement on GPUs; empty if there is none."""
    measured: Measured = json.loads(RECORDED.read_text()) if RECORDED.exists() else {}
    return measured


if __name__ == "__main__":
    sys.exit(main())
