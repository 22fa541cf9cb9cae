"""Types of setting values, each with its bounds."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, NonNegativeFloat, PositiveFloat

Fraction = Annotated[float, Field(ge=0.0, lt=1.0)]
"""A fraction from 0 (included) to 1 (excluded)."""


def _refuse_under_one_second(time: str) -> str:
    if 60.0 * float(time.removesuffix("min")) < 1.0:
        raise ValueError("must be at least 0.017min (1 s), or 0 for no periodic checkpoints")
    return time


Minutes = Annotated[
    str,
    Field(pattern=r"^([0-9]{1,7}(\.[0-9]{1,6})?|\.[0-9]{1,6})min$"),
    AfterValidator(_refuse_under_one_second),
]
"""The time between two checkpoints, such as `15min`."""

PositiveInt = Annotated[int, Field(gt=0, le=10**12)]
NonNegativeInt = Annotated[int, Field(ge=0, le=10**12)]
Width = Annotated[int, Field(gt=0, le=10**8)]
"""The width of a layer, or the number of entries in a batch or a table."""
Depth = Annotated[int, Field(gt=0, le=10_000)]
"""The number of layers. The bound is low because each layer is built before a run starts."""
Seed = Annotated[int, Field(ge=0, lt=2**63)]
Seconds = Annotated[float, Field(gt=0.0, le=1e9)]
"""At most about thirty years: operating systems' timers accept no more."""


def _over_one_or_0(to_do_what: str) -> AfterValidator:
    """Refuses factors up to 1, except 0, which is there `to_do_what`."""

    def check(factor: float) -> float:
        if 0.0 < factor <= 1.0:
            raise ValueError(f"must be greater than 1, or 0 to {to_do_what}")
        return factor

    return AfterValidator(check)


def _refuse_straggler_factor_up_to_one(factor: float) -> float:
    if factor <= 1.0:
        raise ValueError("must be greater than 1 (straggler.every=0 disables detection)")
    return factor


HealthFactor = Annotated[NonNegativeFloat, _over_one_or_0("compare no machines")]
"""A machine is refused if it is over this many times slower than the others."""

FunctionName = Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")]
"""A function as `module:function`."""

StragglerFactor = Annotated[PositiveFloat, AfterValidator(_refuse_straggler_factor_up_to_one)]
"""A worker is a straggler if its compute time is over this many times that of the others."""

SpikeFactor = Annotated[NonNegativeFloat, _over_one_or_0("disable spike detection")]
"""A loss over this many times the median loss is a spike; 0 disables the detection."""

TimeFactor = Annotated[float, Field(ge=1.0, le=1e6)]
"""A time limit as a multiple of a measured time; below 1 the measured time itself would fail."""

Share = Annotated[float, Field(gt=0.0, le=1.0)]
"""A fraction from 0 (excluded) to 1 (included)."""


def _refuse_malformed_ports(text: str) -> str:
    first, _, last = text.partition(":")
    are_numbers = text.isascii() and len(text) <= 11 and first.isdecimal() and last.isdecimal()
    if not (are_numbers and 1 <= int(first) <= int(last) <= 65535):
        raise ValueError("write FIRST:LAST with ports from 1 to 65535, e.g. 20000:20100")
    return text


Ports = Annotated[str, AfterValidator(_refuse_malformed_ports)]
"""The first and last port of a range, both included, such as `20000:20100`."""

ScheduleName = Literal["gpipe", "1f1b", "interleaved_1f1b", "zero_bubble"]
"""A pipeline schedule: the order of the forward and backward passes of a pipeline's stages."""

SEVERAL_STAGES: tuple[ScheduleName, ...] = ("interleaved_1f1b", "zero_bubble")
"""The pipeline schedules that support several stages on one rank (`vp`)."""


def _recomputation_name(value: Any) -> Any:
    """The name of a mode for a truth value, which earlier versions took, or for None, as which
    `--set` reads the word `none`."""
    text = str(value).lower()
    return {"none": "none", "false": "none", "true": "full"}.get(text, value)


Recomputation = Annotated[
    Literal["none", "selective", "full"], BeforeValidator(_recomputation_name)
]
"""Which activations of a block backward recomputes."""
