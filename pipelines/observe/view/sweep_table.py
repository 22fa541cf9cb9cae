"""The table of a sweep: speed, state bytes and peak memory of each layout, from its run's files."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import median
from typing import Any, Literal

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from elastic.geometry.layout import Layout
from pipelines.observe.history.run_folder import RunFolder, Tail
from pipelines.observe.history.step_time import StepTimeAccount

SweepVerdict = Literal["ran", "not feasible", "out of memory", "failed", "interrupted"]
SweepLine = dict[str, Any]

COLUMNS = (
    *("layout", "workers", "step s", "{unit}/s", "/worker"),
    *("TFLOP/s", "param MB", "grad MB", "optim MB", "peak MB", "loss"),
)
ON_DEVICE = "torch's allocations on the GPU"
ON_HOST = "resident memory above that of a warm worker before training"


@dataclass(frozen=True)
class Row:
    """One layout. Bytes are the largest of any worker; `reason` says why a layout did not run;
    `loss` is that of the last step."""

    layout: str
    workers: int
    verdict: SweepVerdict
    reason: str = ""
    step_s: float | None = None
    tokens_per_s: float | None = None
    param_bytes: int | None = None
    grad_bytes: int | None = None
    optimizer_bytes: int | None = None
    peak_bytes: int | None = None
    peak_is_of: str = ""
    loss: float | None = None
    tflops: float | None = None
    mfu: float | None = None


def refused(layout: Layout, reason: str) -> Row:
    """The row of an infeasible layout."""
    return Row(str(layout), layout.num_workers, "not feasible", reason)


def measure(layout: Layout, folder: RunFolder, broken: str = "") -> Row:
    """The row of a run that has ended, from its files; `broken` is the reason of the end if the
    controller could not record it."""
    journal = list(Tail(folder.journal).drain())
    other = _other_layout(layout, journal)
    if other:
        return refused(layout, other)
    steps = {line["step"]: line for line in Tail(folder.metrics).drain()}
    verdict, reason = _ending(journal, broken)
    counted = [line for step, line in steps.items() if step > 1 and not line.get("missing")]
    step_s = median(line["step_s"] for line in counted) if counted else None
    tokens = median(line["tokens"] for line in counted) if counted else 0
    speed = _speed(journal, counted)
    peak_bytes, peak_is_of = _peak(journal, list(Tail(folder.system).drain()))
    return Row(
        layout=str(layout),
        workers=layout.num_workers,
        verdict=verdict,
        reason=reason,
        step_s=step_s,
        tokens_per_s=tokens / step_s if step_s else None,
        **_state_bytes(journal),
        peak_bytes=peak_bytes,
        peak_is_of=peak_is_of,
        loss=steps[max(steps)]["loss"] if steps else None,
        tflops=speed["tflops"],
        mfu=speed["mfu"],
    )


def show(console: Console, title: str, rows: Sequence[Row], unit: str = "tokens") -> None:
    """Print the table, and below it the reason of each layout that did not run."""
    table = Table(
        title=title, title_justify="left", box=SIMPLE_HEAD, collapse_padding=True, pad_edge=False
    )
    for number, name in enumerate(COLUMNS):
        table.add_column(
            name.format(unit=unit), justify="right" if number else "left", no_wrap=True
        )
    for row in rows:
        table.add_row(*_cells(row))
    console.print(table)
    peaks = sorted({row.peak_is_of for row in rows if row.peak_is_of})
    console.print(
        "Medians without the first step; MB are 10^6 bytes on the worker with the most"
        + "".join(f"; peak: {peak}" for peak in peaks),
        highlight=False,
        soft_wrap=True,
    )
    for row in rows:
        if row.verdict != "ran":
            line = f"{row.layout}: {row.verdict}: {row.reason}"
            console.print(line, highlight=False, markup=False, soft_wrap=True)


def write(folder: Path, rows: Sequence[Row]) -> tuple[Path, Path]:
    """Write `sweep.csv` and `sweep.json`; return where they are."""
    as_csv, as_json = folder / "sweep.csv", folder / "sweep.json"
    with as_csv.open("w", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Row)])
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)
    as_json.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    return as_csv, as_json


def _cells(row: Row) -> list[str]:
    if row.verdict != "ran":
        return [row.layout, str(row.workers), row.verdict]
    sizes = (row.param_bytes, row.grad_bytes, row.optimizer_bytes, row.peak_bytes)
    per_worker = None if row.tokens_per_s is None else row.tokens_per_s / row.workers
    return [
        row.layout,
        str(row.workers),
        _cell(row.step_s, ".4f"),
        _cell(row.tokens_per_s, ",.0f"),
        _cell(per_worker, ",.0f"),
        _cell(row.tflops, ".3g") + ("" if row.mfu is None else f" ({row.mfu:.0%})"),
        *(_megabytes(size) for size in sizes),
        _cell(row.loss, ".6f"),
    ]


def _cell(value: float | None, style: str) -> str:
    return "" if value is None else format(value, style)


def _megabytes(size: int | None) -> str:
    return "" if size is None else format(size / 1e6, ",.2f" if size < 1e9 else ",.0f")


def _ending(journal: list[SweepLine], broken: str) -> tuple[SweepVerdict, str]:
    endings = [line for line in journal if line.get("command") == "Stopped"]
    if not endings:
        return "failed", broken or "it did not end"
    outcome, reason = endings[-1]["outcome"], endings[-1]["reason"]
    raised = [line for line in journal if line.get("event") == "WorkerRaised"]
    shortages = [line for line in raised if line["kind"] == "memory"]
    if outcome == "failed" and shortages:
        return "out of memory", reason
    if outcome == "completed":
        # The run has gone on under another layout; this one is out of memory all the same.
        return ("out of memory", shortages[0].get("message", "")) if shortages else ("ran", "")
    verdicts: dict[str, SweepVerdict] = {"user_error": "not feasible", "interrupted": "interrupted"}
    return verdicts.get(outcome, "failed"), reason


def _other_layout(layout: Layout, journal: list[SweepLine]) -> str:
    """Another layout that the run used, and why; empty if it used the requested one."""
    for line in journal:
        if line.get("command") == "Resume" and line["layout"] != str(layout):
            reasons = [form["reason"] for form in journal if form.get("command") == "Form"]
            return f"{line['layout']} was chosen instead: {reasons[-1]}"
    return ""


def _state_bytes(journal: list[SweepLine]) -> dict[str, int]:
    resumes = [line for line in journal if line.get("command") == "Resume"]
    if not resumes:
        return {}
    names = ("param_bytes", "grad_bytes", "optimizer_bytes")
    return {name: max(held[name] for held in resumes[-1]["state"]) for name in names}


def _speed(journal: list[SweepLine], counted: list[SweepLine]) -> dict[str, float | None]:
    """The speed of a worker, as `Device.speed` says."""
    account = StepTimeAccount()
    for line in journal:
        account.take_ready(line)
    for row in counted:
        account.take(row)
    return account.device.speed(account.run)


def _peak(journal: list[SweepLine], samples: list[SweepLine]) -> tuple[int | None, str]:
    """The highest peak memory of any worker, and its kind.

    A peak of host memory is measured from the worker's memory before the first groups formed.
    """
    on_device = [line["device_peak_bytes"] for line in samples if line["device_peak_bytes"]]
    if on_device:
        return max(on_device), ON_DEVICE
    formed = next((line["time"] for line in journal if line.get("command") == "Form"), 0.0)
    before = {
        line["worker"]: line["host_memory_bytes"] for line in samples if line["time"] <= formed
    }
    peaks = [
        line["host_peak_bytes"] - before[line["worker"]]
        for line in samples
        if line["worker"] in before and line["time"] > formed
    ]
    return (max(peaks), ON_HOST) if peaks else (None, "")
