"""The kinds of values that settings have, each with its bounds."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, NonNegativeFloat, PositiveFloat

Fraction = Annotated[float, Field(ge=0.0, lt=1.0)]
"""A part of a whole, from 0 to below 1."""


def _at_least_a_second(time: str) -> str:
    if 60.0 * float(time.removesuffix("min")) < 1.0:
        raise ValueError("a time under 1 s; give at least 0.017min, or 0 for no checkpoints")
    return time


Minutes = Annotated[
    str,
    Field(pattern=r"^([0-9]{1,7}(\.[0-9]{1,6})?|\.[0-9]{1,6})min$"),
    AfterValidator(_at_least_a_second),
]
"""A time between checkpoints, such as `15min`."""

PositiveInt = Annotated[int, Field(gt=0, le=10**12)]
NonNegativeInt = Annotated[int, Field(ge=0, le=10**12)]
Width = Annotated[int, Field(gt=0, le=10**8)]
"""Of a layer, or how many of a kind a batch or a table has."""
Depth = Annotated[int, Field(gt=0, le=10_000)]
"""How many layers; a module for each is made before a run begins."""
Seed = Annotated[int, Field(ge=0, lt=2**63)]
Seconds = Annotated[float, Field(gt=0.0, le=1e9)]
"""At most some thirty years: clocks of operating systems take no more."""


def _over_one(factor: float) -> float:
    if 0.0 < factor <= 1.0:
        raise ValueError("a loss as high as the others is no spike: give more than 1, or 0 for off")
    return factor


def _slower(factor: float) -> float:
    if factor <= 1.0:
        raise ValueError("who takes as long as the others is no straggler: give more than 1")
    return factor


StragglerFactor = Annotated[PositiveFloat, AfterValidator(_slower)]
"""How many times as long as the others a straggler computes."""

SpikeFactor = Annotated[NonNegativeFloat, AfterValidator(_over_one)]
"""How many times the usual loss is a spike; 0 is never."""

TimeFactor = Annotated[float, Field(ge=1.0, le=1e6)]
"""How many times as long as measured something may take; under 1 nothing could be in time."""

Share = Annotated[float, Field(gt=0.0, le=1.0)]
"""A part of a whole, or all of it."""


def _ports_in_order(text: str) -> str:
    first, _, last = text.partition(":")
    are_numbers = text.isascii() and len(text) <= 11 and first.isdecimal() and last.isdecimal()
    if not (are_numbers and 1 <= int(first) <= int(last) <= 65535):
        raise ValueError("write the first and the last port, from 1 to 65535, e.g. 20000:20100")
    return text


Ports = Annotated[str, AfterValidator(_ports_in_order)]
"""The first and the last port, such as `20000:20100`."""

ScheduleName = Literal["gpipe", "1f1b", "interleaved_1f1b", "zero_bubble"]
"""The order of a pipeline's passes."""

SEVERAL_STAGES: tuple[ScheduleName, ...] = ("interleaved_1f1b", "zero_bubble")
"""The schedules that may have several stages a rank (`vp`)."""
