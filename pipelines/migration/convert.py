"""`elastic convert`: a DeepSpeed configuration as arguments, or as a module for a loop."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pipelines.errors import UserError
from pipelines.migration.batch import convert_batch, convert_elasticity
from pipelines.migration.computation import (
    convert_clipping,
    convert_precision,
    convert_profiler,
    convert_recomputation,
)
from pipelines.migration.configuration import Configuration, read_configuration
from pipelines.migration.conversion import Conversion, Target
from pipelines.migration.loop_module import loop_module
from pipelines.migration.optimizer import convert_optimizer
from pipelines.migration.other_keys import report_others
from pipelines.migration.parallelism import convert_model_axes, convert_zero
from pipelines.migration.schedule import convert_schedule
from pipelines.settings.overrides import override
from pipelines.settings.settings import TrainSettings


@dataclass(frozen=True)
class Converted:
    """The arguments or the module, and a line for each key of the configuration."""

    text: str
    lines: list[str]


def convert(file: str, num_gpus: int | None, target: Target) -> Converted:
    """Translate a DeepSpeed configuration of a job with so many GPUs.

    Raises `UserError` for a file that is no JSON object, and for values that DeepSpeed refuses or
    that contradict each other.
    """
    keys = read_configuration(Path(file))
    conversion = Conversion(target, num_gpus)
    _convert(keys, conversion)
    try:
        override(TrainSettings(), conversion.changes())
    except UserError as error:
        raise UserError(f"{keys.name}: {error}") from None
    is_loop = target == "loop"
    text = loop_module(keys.name, conversion) if is_loop else "\n".join(conversion.arguments())
    missing = [key for key in keys.lines if key not in keys.values]
    lines = [f"{key}: {keys.lines[key]}" for key in (*keys.values, *missing)]
    return Converted(text, [_on_one_line(line) for line in lines])


def _on_one_line(line: str) -> str:
    """A key of the file may have any characters, line breaks included."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in line)


def _convert(keys: Configuration, conversion: Conversion) -> None:
    """Each part reports its keys; the order is that in which they depend on each other."""
    convert_model_axes(keys, conversion)
    convert_batch(keys, conversion)
    convert_elasticity(keys, conversion)
    convert_zero(keys, conversion)
    convert_precision(keys, conversion)
    convert_clipping(keys, conversion)
    convert_recomputation(keys, conversion)
    convert_profiler(keys, conversion)
    convert_optimizer(keys, conversion)
    convert_schedule(keys, conversion)
    if conversion.peak is not None and not conversion.is_loop:
        conversion.settings["optimizer.lr"] = conversion.peak
    report_others(keys)
