"""Conversion of the lines of a run's files to MLflow metrics and params.

The same line always gives the same metrics. MLflow keys a metric by name, timestamp, step and
value, so a line that is sent twice is stored once.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from math import isfinite
from typing import Any

from mlflow.entities import Metric
from mlflow.utils.validation import MAX_ENTITY_KEY_LENGTH, MAX_PARAM_VAL_LENGTH

from elastic.protocol.votes import SPLIT
from pipelines.observe.history.formatting import shortened
from pipelines.observe.history.goodput import Reading
from pipelines.observe.history.membership import Membership
from pipelines.observe.history.step_time import Device, times_of

STEP_FIELDS = ("loss", "grad_norm")
SECOND_FIELDS = ("lr", "step_s", "world_size", "generation")
SPLIT_FIELDS = ("compute_s", "redone_s", "paused_s", "waiting_s")
SYSTEM_FIELDS = {
    "cpu_percent": ("cpu_utilization_percentage", 1.0),
    "host_memory_bytes": ("host_memory_usage_megabytes", 1e-6),
    "device_memory_bytes": ("device_memory_usage_megabytes", 1e-6),
    "device_use_percent": ("device_utilization_percentage", 1.0),
    "host_peak_bytes": ("host_peak_memory_megabytes", 1e-6),
    "device_peak_bytes": ("device_peak_memory_megabytes", 1e-6),
    "data_wait_s": ("data_wait_seconds", 1.0),
}
"""For each field of a sample its name in MLflow's system metrics, and its scale."""
COUNTED = {
    "lost": "workers_lost",
    "joined": "workers_joined",
    "skipped": "steps_skipped",
    "not finite": "evaluations_not_finite",
}
"""The metric that counts the events of a kind."""
UNKNOWN_DEVICE = Device()
FOREIGN = re.compile(r"[^\w.\- /]")


def step_metrics(
    row: Mapping[str, Any], unit: str = "tokens", device: Device = UNKNOWN_DEVICE
) -> Iterator[Metric]:
    """The finite numbers of a committed step; `unit` is what its field `tokens` counts.

    MLflow's store takes 0.1 ms of a core for each metric. So of steps shorter than a second, only
    one a second has more than its loss, its gradient norm and what a script reports.
    """
    where = (row["time"], row["step"])
    for field in STEP_FIELDS:
        yield from _metric(field, row.get(field), *where)
    for name, value in (row.get("reported") or {}).items():
        yield from _metric(name, value, *where)
    if not is_first_of_second(row):
        return
    for field in SECOND_FIELDS:
        yield from _metric(field, row.get(field), *where)
    if row["step_s"]:  # a missing record has no numbers
        yield from _metric(f"{unit}_per_s", row["tokens"] / row["step_s"], *where)
    times = times_of(row)
    if times is not None:
        for name in SPLIT:
            yield from _metric(f"step/{name}", getattr(times, name), *where)
        speed = device.speed(times)
        yield from _metric(f"{unit}_per_s_per_device", speed["tokens_per_s"], *where)
        yield from _metric("device_tflops", speed["tflops"], *where)
        yield from _metric("device_mfu", speed["mfu"], *where)


def is_first_of_second(row: Mapping[str, Any]) -> bool:
    """Whether no earlier step has ended in the same second of the clock."""
    times = times_of(row)
    spent_s = times.seconds if times else row["step_s"]
    return int(row["time"]) > int(row["time"] - (spent_s or 1.0))


def system_metrics(sample: Mapping[str, Any], start_ms: int) -> Iterator[Metric]:
    """A worker's sample as MLflow system metrics; their step is the time in seconds of the run."""
    worker = FOREIGN.sub("_", sample["worker"])
    seconds = max(0, round(sample["time"] - start_ms / 1000))
    for field, (name, scale) in SYSTEM_FIELDS.items():
        value = sample.get(field)
        scaled = None if value is None else value * scale
        yield from _metric(f"system/{worker}/{name}", scaled, sample["time"], seconds)


def statistics_metrics(row: Mapping[str, Any]) -> Iterator[Metric]:
    """The model's statistics after a step: `statistics/<block>/<name>`."""
    for group, numbers in row["groups"].items():
        for name, value in numbers.items():
            where = (row["time"], row["step"])
            yield from _metric(f"statistics/{FOREIGN.sub('_', group)}/{name}", value, *where)


def event_metrics(membership: Membership, first: int) -> Iterator[Metric]:
    """The numbers of the run events from number `first` on.

    Losses, joins and skipped steps are running counts, so that a chart shows when each occurred.
    """
    counts = {kind: membership.dropped.get(kind, 0) for kind in COUNTED}
    num_dropped = sum(membership.dropped.values())
    for index, run_event in enumerate(membership.run_events, num_dropped):
        kind, where = run_event.kind, (run_event.time, run_event.step)
        if kind in counts:
            counts[kind] += 1
        if index < first:
            continue
        if kind in counts:
            yield from _metric(COUNTED[kind], counts[kind], *where)
        elif kind == "resumed":
            yield from _metric("world_size", run_event.world_size, *where)
            yield from _metric("recovery_s", run_event.value, *where)
        elif kind == "evaluated":
            yield from _metric("eval_loss", run_event.value, *where)
            for name, value in run_event.metrics:
                yield from _metric(f"eval_{name}", value, *where)


def reading_metrics(reading: Reading) -> Iterator[Metric]:
    """The time account of the run at a line of its journal."""
    split, where = reading.split, (reading.time, reading.step)
    yield from _metric("goodput", split.goodput, *where)
    for name in SPLIT_FIELDS:
        yield from _metric(name, getattr(split, name), *where)
    yield from _metric("worker_hours", reading.worker_s / 3600, *where)


def params(recipe: Mapping[str, Any]) -> dict[str, str]:
    """A nested recipe as MLflow's flat params: `model.dim` and so on."""
    flat: dict[str, str] = {}
    for name, value in recipe.items():
        if isinstance(value, Mapping) and value:
            flat |= {f"{name}.{inner}": text for inner, text in params(value).items()}
        else:
            flat[name] = str(value)
    return {
        FOREIGN.sub("_", name)[:MAX_ENTITY_KEY_LENGTH]: shortened(text, MAX_PARAM_VAL_LENGTH)
        for name, text in flat.items()
    }


def _metric(name: str, value: float | None, time: float, step: int) -> Iterator[Metric]:
    if value is not None and isfinite(value):
        yield Metric(name, float(value), int(time * 1000), step)
