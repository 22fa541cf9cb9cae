"""Memory per parameter: the published numbers and the tables of `elastic plan`."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from elastic.planner.footprint import FOOTPRINTS
from pipelines.errors import UserError
from pipelines.observe.view.footprint_table import footprint_tables, parse_counts


def test_footprints_match_the_zero_paper() -> None:
    """Rajbhandari et al., 2020, figure 1: 7.5 B parameters, 64 GPUs: 120, 31.4, 16.6, 1.9 GB."""
    sizes = [FOOTPRINTS["mixed"].divided(stage, 64) * 7.5 for stage in range(4)]
    assert sizes == pytest.approx([120, 31.4, 16.6, 1.88], abs=0.05)


def test_total_bytes_per_parameter() -> None:
    assert [footprint.total for footprint in FOOTPRINTS.values()] == [8, 16, 24]


def test_activations_are_never_divided() -> None:
    assert FOOTPRINTS["full"].divided(3, 1_000_000) == pytest.approx(8, abs=1e-4)


def test_one_worker_has_the_full_footprint_at_any_stage() -> None:
    for footprint in FOOTPRINTS.values():
        assert {footprint.divided(stage, 1) for stage in range(4)} == {footprint.total}


@pytest.mark.parametrize(("zero", "num_shards"), [(4, 1), (-1, 1), (3, 0)])
def test_invalid_zero_stage_or_shard_count_is_refused(zero: int, num_shards: int) -> None:
    with pytest.raises(ValueError):
        FOOTPRINTS["mixed"].divided(zero, num_shards)


def test_tables_show_formula_and_sizes() -> None:
    console = Console(width=120, record=True, file=io.StringIO())
    for formula, table in footprint_tables(7e9, [1, 8]):
        console.print(formula, table)
    text = console.export_text()
    assert "2 parameters + 2 gradients + 12 optimizer = 16 bytes per parameter" in text
    assert "112 GB" in text and "14 GB" in text


@pytest.mark.parametrize("text", ["", "0", "8,x", "1,,2", "-1"])
def test_bad_world_sizes_are_refused_with_their_option(text: str) -> None:
    with pytest.raises(UserError, match="--world-sizes"):
        parse_counts(text)
