"""A Python module for a custom training loop, with what a DeepSpeed configuration says of it."""

from __future__ import annotations

from collections.abc import Iterator

from pipelines.migration.conversion import Conversion, WarmupSchedule


def loop_module(name: str, conversion: Conversion) -> str:
    """The source of the module; `name` is that of the configuration."""
    options = " ".join(conversion.arguments())
    train = " ".join(filter(None, ("elastic train FILE.py:main", options)))
    name = name.replace('"', "'").replace("\\", "/")  # it goes into a docstring
    lines = [f'"""Written by `elastic convert {name} --to loop`.', "", train, '"""', ""]
    schedule = conversion.schedule
    if schedule and (schedule.kind == "WarmupCosineLR" or not schedule.is_linear):
        lines += ["import math", ""]
    if conversion.optimizer or schedule or conversion.scaler:
        lines += ["import torch", ""]
    if conversion.microbatch:
        lines += [
            f"MICROBATCH = {conversion.microbatch}",
            f"NUM_MICROBATCHES = {conversion.num_microbatches}",
        ]
    lines.append(f"MAX_GRAD_NORM = {conversion.max_grad_norm}")
    if conversion.optimizer:
        lines += ["", "", "def make_optimizer(parameters):", f"    return {_optimizer(conversion)}"]
    if schedule:
        lines += [
            "",
            "",
            *_rate(schedule, conversion.peak),
            "",
            "",
            "def make_scheduler(optimizer):",
        ]
        lines.append("    return torch.optim.lr_scheduler.LambdaLR(optimizer, rate)")
    if conversion.scaler:
        arguments = ", ".join(f"{key}={value}" for key, value in conversion.scaler.items())
        lines += ["", "", "def make_scaler(device):"]
        lines.append(f"    return torch.amp.GradScaler(device, {arguments})")
    return "\n".join(lines)


def _optimizer(conversion: Conversion) -> str:
    """The call; a scheduler with a peak of its own replaces the optimizer's rate."""
    arguments = dict(conversion.optimizer_arguments)
    if conversion.peak is not None:
        arguments["lr"] = conversion.peak
    written = [f"{name}={value!r}" for name, value in arguments.items() if name.isidentifier()]
    return f"torch.optim.{conversion.optimizer}({', '.join(['parameters', *written])})"


def _rate(schedule: WarmupSchedule, peak: float | None) -> Iterator[str]:
    """DeepSpeed steps its scheduler after the optimizer, so that it is one step late."""
    steps, total = schedule.warmup_steps, schedule.total_steps
    of = f"{peak}, the optimizer's lr" if peak is not None else "the optimizer's lr"
    yield "def rate(step):"
    yield f'    """{schedule.kind}: the rate of a step, counted from 0, as a fraction of {of}."""'
    if schedule.kind == "WarmupCosineLR" and schedule.first:
        yield "    if step == 0:"
        yield "        return 0.0"
    yield "    step = max(step - 1, 0)"
    yield f"    if step < {steps}:"
    risen = f"step / {steps}" if schedule.is_linear else f"math.log(step + 1) / math.log({steps})"
    yield f"        return {_between(schedule.first, risen)}"
    match schedule.kind:
        case "WarmupLR":
            yield "    return 1.0"
        case "WarmupDecayLR":
            left = f"max(0.0, ({total} - step) / {max(1, total - steps)})"
            yield f"    return {_between(schedule.first, left)}"
        case "WarmupCosineLR":
            yield f"    progress = min(1.0, (step - {steps - 1}) / {max(1, total - steps)})"
            cosine = "(1 + math.cos(math.pi * progress)) / 2"
            yield f"    return {_between(schedule.last, cosine)}"


def _between(low: float, fraction: str) -> str:
    """The source of a number from `low` to 1."""
    return f"{low} + {1 - low} * {fraction}" if low else fraction
