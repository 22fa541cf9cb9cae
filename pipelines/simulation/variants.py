"""Variants of a simulated run, which are compared on one trace."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from pipelines.errors import UserError
from pipelines.simulation.request import SimulateRequest

MOST_VARIANTS = 64
EXAMPLE = '--compare "snapshot.every=1,5"'


def variants_of(request: SimulateRequest) -> list[tuple[str, SimulateRequest]]:
    """Each variant with its name: every combination of the values of `--compare`. Without that, the
    request alone, with an empty name. Raises `UserError`."""
    choices = [list(_choices(text)) for text in request.compare]
    keys = [choice[0][0] for choice in choices]
    repeated = [key for key in keys if keys.count(key) > 1]
    if repeated:
        raise UserError(f"--compare {repeated[0]}: give all its values in one option")
    combinations = list(product(*choices))
    if len(combinations) > MOST_VARIANTS:
        raise UserError(
            f"--compare: {len(combinations):,} variants; compare at most {MOST_VARIANTS} at once"
        )
    return [(_name(pairs), _changed(request, pairs)) for pairs in combinations]


def compares_workers(request: SimulateRequest) -> bool:
    """Whether the variants differ in their workers or in how these are laid out."""
    return any(text.partition("=")[0].strip() in ("workers", "layout") for text in request.compare)


def _choices(text: str) -> Iterator[tuple[str, str]]:
    """The key and each value of one `--compare`. Semicolons separate values that have commas."""
    key, equals, values = text.partition("=")
    key = key.strip()
    parts = values.split(";" if ";" in values or key == "layout" else ",")
    if not equals or not key or not all(part.strip() for part in parts):
        raise UserError(f"--compare {text}: write KEY=VALUE,VALUE, e.g. {EXAMPLE}")
    return ((key, part.strip()) for part in parts)


def _name(pairs: tuple[tuple[str, str], ...]) -> str:
    return " ".join(f"{key}={value}" for key, value in pairs)


def _changed(request: SimulateRequest, pairs: tuple[tuple[str, str], ...]) -> SimulateRequest:
    for key, value in pairs:
        if key == "layout":
            request = replace(request, layout=value)
        elif key == "workers":
            request = replace(request, workers=value)
        else:
            request = replace(request, changes=(*request.changes, f"{key}={value}"))
    return request
