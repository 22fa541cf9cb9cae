"""ZeRO stages: what `fsdp` shards at each stage, and the FSDP strategy names for them.

Rajbhandari et al., ZeRO, 2020, section 5; the names are those of torch's `ShardingStrategy`.
"""

from __future__ import annotations

from typing import Literal

from elastic.geometry.errors import InvalidLayout

ZeroPart = Literal["optimizer", "gradients", "parameters"]
"""A part of the model that a worker keeps while it trains."""

PARTS: tuple[ZeroPart, ...] = ("optimizer", "gradients", "parameters")
"""Stage n shards the first n of these."""

STAGES = tuple(range(len(PARTS) + 1))

STRATEGIES = {"NO_SHARD": 0, "SHARD_GRAD_OP": 2, "FULL_SHARD": 3, "HYBRID_SHARD": 3}
"""The stage of each FSDP strategy name."""

HYBRID = "HYBRID_SHARD"
"""Shards within replicas: another name for `FULL_SHARD` if `dp` is 2 or more."""


def divides(zero: int, part: ZeroPart) -> bool:
    """Whether a stage shards this part."""
    return part in PARTS[:zero]


def zero_in_step(zero: int, pp: int) -> int:
    """The stage whose memory a step takes: in a pipeline, stage 3 keeps gathered parameters and
    whole gradients from a worker's first microbatch to its last, as stage 1 does."""
    return 1 if zero == 3 and pp > 1 else zero


def parse_stage(text: str) -> int:
    """Read a stage: its number, or an FSDP strategy name in any case. Raises `InvalidLayout`."""
    name = text.upper()
    if text.isascii() and text.isdecimal():
        return int(text[:9])
    if name not in STRATEGIES:
        raise InvalidLayout(
            f"zero={text}: the ZeRO stage must be 0, 1, 2 or 3, or one of {', '.join(STRATEGIES)}"
        )
    return STRATEGIES[name]
