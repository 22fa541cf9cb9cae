"""The ZeRO stages and the names that FSDP has for them."""

from __future__ import annotations

import pytest

from elastic.geometry.errors import InvalidLayout
from elastic.geometry.layout import Layout
from elastic.geometry.target_layout import TargetLayout
from elastic.geometry.zero import PARTS, STAGES, divides


def test_each_zero_stage_shards_one_more_kind() -> None:
    divided = [[part for part in PARTS if divides(zero, part)] for zero in STAGES]
    assert divided == [
        [],
        ["optimizer"],
        ["optimizer", "gradients"],
        ["optimizer", "gradients", "parameters"],
    ]


@pytest.mark.parametrize(
    ("text", "zero"),
    [
        ("fsdp=4,zero=NO_SHARD", 0),
        ("fsdp=4,zero=SHARD_GRAD_OP", 2),
        ("fsdp=4,zero=FULL_SHARD", 3),
        ("dp=2,fsdp=2,zero=HYBRID_SHARD", 3),
        ("zero=hybrid_shard,dp=2", 3),
        ("zero=Shard_Grad_Op", 2),
        ("zero=1", 1),
    ],
)
def test_fsdp_names_are_parsed_as_zero_stages(text: str, zero: int) -> None:
    assert Layout.parse(text).zero == TargetLayout.parse(text).zero == zero


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fsdp=4,zero=HYBRID_SHARD", "set dp=2 or more"),
        ("dp=1,fsdp=4,zero=hybrid_shard", "zero=FULL_SHARD"),
        ("fsdp=4,zero=SHARD", "0, 1, 2 or 3, or one of NO_SHARD"),
        ("fsdp=4,zero=", "0, 1, 2 or 3"),
        ("fsdp=4,zero=-1", "0, 1, 2 or 3"),
    ],
)
def test_invalid_zero_names_are_refused(text: str, message: str) -> None:
    with pytest.raises(InvalidLayout, match=message):
        Layout.parse(text)
