"""The learning-rate scheduler of a DeepSpeed configuration."""

from __future__ import annotations

from typing import Any, get_args

from pipelines.errors import UserError
from pipelines.migration.configuration import AUTO, Configuration
from pipelines.migration.conversion import Conversion, ScheduleKind, WarmupSchedule

TYPE = "scheduler.type"
PARAMS = "scheduler.params"
KINDS: dict[str, ScheduleKind] = {kind: kind for kind in get_args(ScheduleKind)}
WARMUP_STEPS = 1000
DECAY_PEAK = 1e-3
COSINE_END = 1e-4
NEEDED = ("warmup_max_lr", "warmup_num_steps", "total_num_steps")
OTHERS = {
    "OneCycle": "use torch.optim.lr_scheduler.OneCycleLR in a loop",
    "LRRangeTest": "use torch.optim.lr_scheduler.LambdaLR in a loop",
}


def convert_schedule(keys: Configuration, conversion: Conversion) -> None:
    """Add the schedule. Without one, and with an optimizer, the rate is constant."""
    kind = keys.text(TYPE)
    if kind is None:
        if keys.has("optimizer.type") and not conversion.is_loop:
            conversion.settings |= {"optimizer.warmup_steps": 0, "optimizer.decay_steps": 0}
            keys.report_absent("scheduler", "optimizer.warmup_steps=0, optimizer.decay_steps=0")
        return
    if kind not in KINDS:
        advice = OTHERS.get(kind, "DeepSpeed has no such scheduler")
        for key in (TYPE, *keys.below(PARAMS)):
            keys.report(key, f"no counterpart: {advice}")
        return
    unknown = [key for key in NEEDED if keys.values.get(f"{PARAMS}.{key}") == AUTO]
    schedule = _read(keys, conversion, KINDS[kind])
    if "warmup_num_steps" in unknown or "total_num_steps" in unknown:
        keys.report(TYPE, f"no value while {', '.join(unknown)} are auto")
        for key in keys.below(PARAMS):
            keys.has(key)
            keys.report(key, "no value without the others of this scheduler")
        return
    conversion.schedule = schedule
    if conversion.is_loop:
        for key in (TYPE, *keys.below(PARAMS)):
            keys.report(key, "make_scheduler, with DeepSpeed's formula")
    else:
        _add_settings(keys, conversion, schedule)


def _read(keys: Configuration, conversion: Conversion, kind: ScheduleKind) -> WarmupSchedule:
    """The scheduler's arguments, with DeepSpeed's defaults. Raises `UserError`."""
    steps = keys.positive(f"{PARAMS}.warmup_num_steps") or WARMUP_STEPS
    shape = keys.text(f"{PARAMS}.warmup_type") or "log"
    if shape not in ("log", "linear"):
        raise keys.mistake(f"{PARAMS}.warmup_type", "must be log or linear")
    total = keys.positive(f"{PARAMS}.total_num_steps")
    if kind != "WarmupLR" and total is None and f"{PARAMS}.total_num_steps" not in keys.values:
        raise UserError(f"{keys.name}: {PARAMS}: {kind} needs total_num_steps: add it")
    first, last = 0.0, 0.0
    if kind == "WarmupCosineLR":
        first = keys.number(f"{PARAMS}.warmup_min_ratio") or 0.0
        ratio = keys.number(f"{PARAMS}.cos_min_ratio")
        last = COSINE_END if ratio is None else ratio
    else:
        first = _ratio_of_rates(keys, conversion, kind)
    return WarmupSchedule(
        kind=kind,
        warmup_steps=max(2, steps),
        is_linear=shape == "linear",
        first=first,
        total_steps=total or 0,
        last=last,
    )


def _ratio_of_rates(keys: Configuration, conversion: Conversion, kind: ScheduleKind) -> float:
    """Take the peak, which replaces the optimizer's rate; return the first rate's share of it."""
    peak = keys.number(f"{PARAMS}.warmup_max_lr")
    if peak is None and kind == "WarmupDecayLR" and f"{PARAMS}.warmup_max_lr" not in keys.values:
        peak = DECAY_PEAK
    if peak is not None:
        if peak <= 0:
            raise keys.mistake(f"{PARAMS}.warmup_max_lr", "must be greater than 0")
        if conversion.peak is not None and peak != conversion.peak:
            line = f"replaced by {PARAMS}.warmup_max_lr={peak}, as in DeepSpeed"
            keys.lines["optimizer.params.lr"] = line
        conversion.peak = peak
    first = keys.number(f"{PARAMS}.warmup_min_lr") or 0.0
    return first / conversion.peak if conversion.peak else 0.0


def _add_settings(keys: Configuration, conversion: Conversion, schedule: WarmupSchedule) -> None:
    """The schedule of the settings: a linear rise from 0, then a cosine."""
    settings: dict[str, Any] = {
        "optimizer.warmup_steps": schedule.warmup_steps,
        "optimizer.decay_steps": schedule.total_steps,
    }
    if schedule.total_steps:
        settings["optimizer.min_lr_ratio"] = schedule.last
    conversion.settings |= settings
    shape = {
        "WarmupLR": "the rate stays constant after the warm-up",
        "WarmupDecayLR": "the rate falls by a cosine to 0, not linearly: --to loop is exact",
        "WarmupCosineLR": "a linear warm-up, then a cosine",
    }
    keys.report(TYPE, shape[schedule.kind])
    keys.report(f"{PARAMS}.warmup_max_lr", f"optimizer.lr={conversion.peak}")
    line = f"optimizer.warmup_steps={schedule.warmup_steps}"
    keys.report(f"{PARAMS}.warmup_num_steps", f"{line}; DeepSpeed's warm-up ends two steps later")
    keys.report(f"{PARAMS}.total_num_steps", f"optimizer.decay_steps={schedule.total_steps}")
    keys.report(f"{PARAMS}.cos_min_ratio", f"optimizer.min_lr_ratio={schedule.last}")
    line = "the settings' warm-up is linear" if schedule.is_linear else "a linear warm-up, not log"
    keys.report(f"{PARAMS}.warmup_type", line)
    for name in ("warmup_min_lr", "warmup_min_ratio"):
        line = "no counterpart: the warm-up of the settings begins at 0" if schedule.first else ""
        keys.report(f"{PARAMS}.{name}", line or "not needed because the warm-up begins at 0")
