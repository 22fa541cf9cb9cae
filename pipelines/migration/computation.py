"""Precision, clipping, recomputation and profiling of a DeepSpeed configuration."""

from __future__ import annotations

from pipelines.migration.configuration import Configuration
from pipelines.migration.conversion import Conversion

CLIPPING = "gradient_clipping"
DEFAULT_NORM = 1.0
NOT_CLIPPED = 1e30
"""A norm that no gradient reaches: the setting has no value for no clipping."""
BFLOAT16 = ("bf16", "bfloat16")
"""DeepSpeed accepts both names."""
NEVER_GROWS = 2**31 - 1
CHECKPOINTING = "activation_checkpointing"
RECOMPUTES = ("partition_activations", "cpu_checkpointing", "contiguous_memory_optimization")


def convert_precision(keys: Configuration, conversion: Conversion) -> None:
    """Add the dtype. Raises `UserError` if both 16-bit formats are enabled."""
    for block in BFLOAT16:
        if keys.is_enabled(block):
            conversion.settings["dtype"] = "bfloat16"
            keys.report(f"{block}.enabled", "dtype=bfloat16, with float32 parameters to update")
    if not keys.is_enabled("fp16"):
        return
    if "dtype" in conversion.settings:
        raise keys.mistake("fp16.enabled", "contradicts bf16.enabled=true: disable one")
    if not conversion.is_loop:
        keys.report(
            "fp16.enabled",
            "no counterpart: dtype is float32, bfloat16 or float64; add --set dtype=bfloat16",
        )
        for key in keys.below("fp16"):
            keys.report(key, "not needed because bfloat16 and float32 need no loss scale")
        return
    static = keys.number("fp16.loss_scale") or 0.0
    power = keys.whole("fp16.initial_scale_power")
    if power is not None and not 0 <= power < 128:
        raise keys.mistake("fp16.initial_scale_power", "must be from 0 to 127")
    if static < 0:
        raise keys.mistake("fp16.loss_scale", "must not be negative")
    window = keys.positive("fp16.loss_scale_window") or 1000
    conversion.scaler["init_scale"] = static or 2.0 ** (16 if power is None else power)
    conversion.scaler["growth_interval"] = NEVER_GROWS if static else window
    keys.report("fp16.enabled", "make_scaler(device), and torch.autocast(..., torch.float16)")
    keys.report("fp16.loss_scale", "init_scale, constant" if static else "a dynamic scale")
    keys.report("fp16.initial_scale_power", "init_scale of the GradScaler")
    keys.report("fp16.loss_scale_window", "growth_interval of the GradScaler")
    keys.report("fp16.auto_cast", "not needed because torch.autocast casts the inputs")
    for key in keys.below("fp16"):
        keys.report(key, "no counterpart: torch's GradScaler has no such option")


def convert_clipping(keys: Configuration, conversion: Conversion) -> None:
    """Add the norm to which gradients are clipped; 0 does not clip."""
    norm = keys.number(CLIPPING)
    if norm is None and CLIPPING in keys.values:
        return
    if norm is None:
        line = _clip(conversion, DEFAULT_NORM)
        keys.report_absent(CLIPPING, f"{line}, as DeepSpeed 0.19; earlier versions do not clip")
        return
    if norm < 0:
        raise keys.mistake(CLIPPING, "must not be negative")
    keys.report(CLIPPING, _clip(conversion, norm))


def _clip(conversion: Conversion, norm: float) -> str:
    """Add the norm; return what was added."""
    conversion.max_grad_norm = norm or None
    if conversion.is_loop:
        return f"MAX_GRAD_NORM = {conversion.max_grad_norm}"
    conversion.settings["optimizer.max_grad_norm"] = norm or NOT_CLIPPED
    return f"optimizer.max_grad_norm={norm}" if norm else "a norm that no gradient reaches"


def convert_recomputation(keys: Configuration, conversion: Conversion) -> None:
    """DeepSpeed's block configures a function that the model calls; here blocks are recomputed."""
    chosen = [name for name in RECOMPUTES if keys.flag(f"{CHECKPOINTING}.{name}")]
    if chosen:
        conversion.settings[CHECKPOINTING] = "full"
    for name in chosen:
        line = f"{CHECKPOINTING}=full; remove deepspeed.checkpointing from the model"
        if name == "cpu_checkpointing":
            line += "; the activations stay on the device"
        keys.report(f"{CHECKPOINTING}.{name}", line)
    for key in keys.below(CHECKPOINTING):
        keys.report(key, f"not needed because {CHECKPOINTING} is none, full or selective")


def convert_profiler(keys: Configuration, conversion: Conversion) -> None:
    """A step to trace."""
    step = keys.positive("flops_profiler.profile_step")
    if keys.is_enabled("flops_profiler"):
        step = step or 1
        conversion.options["profile"] = f"steps={step}:{step}"
        for name in ("enabled", "profile_step"):
            keys.report(
                f"flops_profiler.{name}", f"--profile steps={step}:{step}, torch.profiler traces"
            )
        for key in keys.below("flops_profiler"):
            keys.report(key, "not needed because the trace has all operations")
