"""ZeRO's stages: what `fsdp` divides at each, and the names that FSDP's strategies have for them.

Rajbhandari et al., ZeRO, 2020, section 5; the names are those of torch's `ShardingStrategy`.
"""

from __future__ import annotations

from typing import Literal

from elastic.geometry.errors import InvalidLayout

ZeroPart = Literal["optimizer", "gradients", "parameters"]
"""What a worker keeps of the model while it trains."""

PARTS: tuple[ZeroPart, ...] = ("optimizer", "gradients", "parameters")
"""Stage n divides the first n of these among the shards."""

STAGES = tuple(range(len(PARTS) + 1))

STRATEGIES = {"NO_SHARD": 0, "SHARD_GRAD_OP": 2, "FULL_SHARD": 3, "HYBRID_SHARD": 3}
"""The stage that is meant by a name of FSDP's."""

HYBRID = "HYBRID_SHARD"
"""Shards within replicas: a name for `FULL_SHARD` where `dp` is 2 or more."""


def divides(zero: int, part: ZeroPart) -> bool:
    """Whether a stage divides this among the shards."""
    return part in PARTS[:zero]


def zero_in_step(zero: int, pp: int) -> int:
    """The stage as which a step takes memory: in a pipeline 3 keeps what it has gathered, and whole
    gradients, from a worker's first microbatch to its last."""
    return 1 if zero == 3 and pp > 1 else zero


def parse_stage(text: str) -> int:
    """Read a stage: its number, or a name of FSDP's in any case. Raises `InvalidLayout`."""
    name = text.upper()
    if text.isascii() and text.isdecimal():
        return int(text[:9])
    if name not in STRATEGIES:
        raise InvalidLayout(
            f"zero={text}: the ZeRO stage is 0, 1, 2 or 3, or one of {', '.join(STRATEGIES)}"
        )
    return STRATEGIES[name]
