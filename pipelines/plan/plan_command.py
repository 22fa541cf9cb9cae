"""`elastic plan RECIPE`: from a recipe to ranked layouts, without data, workers or GPUs."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from elastic.geometry.errors import InvalidLayout
from elastic.geometry.layout import Layout
from elastic.geometry.training_job import Job, TimeFacts
from elastic.planner.devices import DeviceSpec
from elastic.planner.layout_ranking import (
    EFFICIENCY,
    Estimate,
    LayoutRanking,
    Workplace,
    candidate_layouts,
    rank_layouts,
)
from pipelines.errors import UserError
from pipelines.observe.history.formatting import counted
from pipelines.observe.view.status import parse_prices
from pipelines.plan.calibration import measured_at, measured_digest, num_measuring
from pipelines.plan.device_options import DeviceFlags, find_devices
from pipelines.plan.plan_table import show_ranking
from pipelines.plan.planned_program import planned_program
from pipelines.run.job import job_of
from pipelines.run.program import TrainingProgram
from pipelines.settings import TrainSettings
from pipelines.training.replica.step_flops import count_step_flops

TP_DEGREES = (1, 2, 4, 8)


@dataclass(frozen=True)
class PlanRequest:
    """The arguments of `elastic plan RECIPE`."""

    recipe: str
    workers: str = "8"
    device: DeviceFlags = field(default_factory=DeviceFlags)
    prices: tuple[str, ...] = ()
    changes: tuple[str, ...] = ()
    layouts: str | None = None
    efficiency: float = EFFICIENCY
    as_json: bool = False
    measured: str | None = None


@dataclass(frozen=True)
class JobFigures:
    """What is known of a recipe: its job, operations of a step, and tokens of a sample."""

    job: Job
    settings: TrainSettings
    step_flops: float
    recomputed: float
    seq_len: int
    notes: tuple[str, ...] = field(default=())
    times: TimeFacts | None = None


def plan_recipe(request: PlanRequest, console: Console) -> int:
    """Print the ranked layouts for each device and number of workers; return the exit code: 1 if
    nothing fits. Raises `UserError`."""
    if not 0 < request.efficiency <= 1:
        raise UserError(f"--efficiency {request.efficiency:g}: give a share of the peak, e.g. 0.45")
    counts = parse_worker_counts(request.workers)
    layouts = _parse_layouts(request.layouts)
    devices = find_devices(request.device)
    prices = _prices_of(request, devices)
    program = planned_program(request.recipe, request.changes)
    figures = figures_of(request, program, on_gpu=all(device.name != "cpu" for device in devices))
    if request.measured:
        devices, figures = _with_measured(request, program, devices, figures)
    results = list(_rankings(request, figures, devices, prices, counts, layouts))
    if request.as_json:
        rows = [_as_json(device, ranking, figures.seq_len) for device, ranking in results]
        print(json.dumps({"recipe": request.recipe, "notes": figures.notes, "plans": rows}))
    else:
        for device, ranking in results:
            show_ranking(console, request.recipe, device, ranking, figures.seq_len)
        for note in figures.notes:
            console.print(f"note: {note}", highlight=False)
    return 0 if any(ranking.best for _, ranking in results) else 1


def _prices_of(request: PlanRequest, devices: Sequence[DeviceSpec]) -> dict[str, float]:
    """The price of an hour by device. Raises `UserError` for one that is not planned."""
    prices = {name.casefold(): p for name, p in parse_prices(request.prices).items()}
    known = {device.name.casefold() for device in devices}
    if unknown := prices.keys() - known - {""}:
        raise UserError(
            f"--price {min(unknown)}=...: no such device is planned; name one of "
            f"{', '.join(device.name for device in devices)}"
        )
    return prices


def figures_of(request: PlanRequest, program: TrainingProgram, on_gpu: bool) -> JobFigures:
    """Count what the recipe's model needs. Raises `UserError` for one that cannot be counted."""
    settings = program.settings
    limit = program.workload.shape().limits.tp_divides
    degrees = [tp for tp in TP_DEGREES if limit is not None and limit % tp == 0] or [1]
    job = job_of(settings, program, degrees, on_gpu)
    notes = []
    if not job.memory.passes:
        notes.append(
            "activations are not counted: the model cannot run without values; a margin of "
            f"{job.margin:g} stands for them"
        )
    flops = count_step_flops(program.workload, settings)
    if flops is None:
        raise UserError(
            f"recipe {request.recipe}: its operations cannot be counted without a run; measure it "
            "with elastic sweep"
        )
    recomputed = 4 / 3 if settings.activation_checkpointing == "full" else 1.0
    return JobFigures(job, settings, flops, recomputed, program.workload.seq_len, tuple(notes))


def _with_measured(
    request: PlanRequest, program: TrainingProgram, devices: list[DeviceSpec], figures: JobFigures
) -> tuple[list[DeviceSpec], JobFigures]:
    """This machine's device with the number of its workers, and the figures with what is measured
    of the recipe on it. Raises `UserError`."""
    assert request.measured is not None
    if request.device.name is not None:
        raise UserError("--measured is of this machine: leave out --device")
    candidates = candidate_layouts(figures.job, devices[0], num_measuring())
    shapes = sorted({(layout.tp, layout.cp) for layout in candidates} - {(1, 1)})
    measured, took_s = measured_at(
        Path(request.measured),
        request.recipe,
        request.changes,
        measured_digest(program),
        [Layout(tp=tp, cp=cp) for tp, cp in shapes],
    )
    taken = f"measured in {took_s:.0f} s" if took_s else "measured before"
    workers = counted(measured.num_processes, "worker")
    note = f"what steps take is {taken} by {workers} on {measured.machine}: {request.measured}"
    own = replace(devices[0], per_node=max(measured.num_processes, measured.times.machine.cores))
    return [own], replace(figures, times=measured.times, notes=(*figures.notes, note))


def parse_worker_counts(text: str) -> list[int]:
    """Read `8,64,512`. Raises `UserError`."""
    counts = [part.strip() for part in text.split(",")]
    bad = [part for part in counts if not re.fullmatch(r"0*[1-9][0-9]{0,5}", part)]
    if bad:
        raise UserError(
            f"--workers {text}: '{bad[0]}' is not a number of workers; write e.g. 8,64,512"
        )
    return [int(part) for part in counts]


def _parse_layouts(text: str | None) -> list[Layout]:
    try:
        return [Layout.parse(part) for part in (text or "").split(";") if part.strip()]
    except InvalidLayout as error:
        raise UserError(f"--layout: {error}") from None


def _rankings(
    request: PlanRequest,
    figures: JobFigures,
    devices: list[DeviceSpec],
    prices: dict[str, float],
    counts: list[int],
    layouts: list[Layout],
) -> Iterator[tuple[DeviceSpec, LayoutRanking]]:
    settings = figures.settings
    for device in devices:
        peak = device.peak_flops(settings.dtype)
        if settings.peak_tflops is not None:
            peak = settings.peak_tflops * 1e12
        if peak is None:
            raise UserError(
                f"--device {device.name}: its peak in {settings.dtype} is not known; give "
                "--device-flops TFLOPS with --set peak_tflops=TFLOPS, or another dtype"
            )
        price = prices.get(device.name.casefold(), prices.get(""))
        workplace = Workplace(
            device,
            peak,
            figures.step_flops,
            figures.recomputed,
            request.efficiency,
            price,
            figures.times,
        )
        for count in counts:
            yield device, rank_layouts(figures.job, workplace, count, layouts)


def _as_json(device: DeviceSpec, ranking: LayoutRanking, seq_len: int) -> dict[str, Any]:
    return {
        "device": asdict(device),
        "workers": ranking.num_workers,
        "best": str(ranking.best.layout) if ranking.best else None,
        "layouts": [_estimate_as_json(estimate, seq_len) for estimate in ranking.estimates],
        "refused": ranking.refusals,
    }


def _estimate_as_json(estimate: Estimate, seq_len: int) -> dict[str, Any]:
    return {
        "layout": str(estimate.layout),
        "workers": estimate.layout.num_workers,
        "fits": estimate.is_fitting,
        "bytes": {**estimate.memory._asdict(), "total": estimate.memory.total},
        "step_s": estimate.step_s,
        "seconds": estimate.seconds,
        "mfu": estimate.mfu,
        "samples_per_s": estimate.samples_per_s,
        "tokens_per_s": estimate.samples_per_s * seq_len if seq_len > 1 else None,
        "hours": estimate.hours,
        "price": estimate.cost,
        "reason": estimate.reason,
    }
