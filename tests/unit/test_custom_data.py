"""Custom datasets: weighted mixtures, and rows of Arrow and Parquet files."""

from __future__ import annotations

import pickle
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.custom_data.arrow import ArrowDataset
from pipelines.custom_data.mixture import Mixture
from pipelines.errors import UserError

WEIGHTS = st.lists(st.floats(0.01, 100.0), min_size=1, max_size=6)


def test_mixture_reads_each_dataset_from_its_start() -> None:
    mixed = Mixture([("abcd", 1.0), ("xy", 3.0)], 8)
    assert "".join(mixed[i] for i in range(8)) == "abxyxyxy"
    assert [mixed.place_of(i) for i in (0, 2, 7)] == [(0, 0), (1, 0), (1, 1)]
    with pytest.raises(IndexError):
        mixed[8]


@given(weights=WEIGHTS, num_samples=st.integers(0, 400))
def test_mixture_follows_its_weights_to_within_one_sample(
    weights: list[float], num_samples: int
) -> None:
    mixed = Mixture([(range(7), weight) for weight in weights], num_samples)
    used = Counter(mixed.place_of(i)[0] for i in range(num_samples))
    assert sum(used.values()) == len(mixed) == num_samples
    for number, weight in enumerate(weights):
        assert abs(used[number] - num_samples * weight / sum(weights)) < 1.001


def test_invalid_mixture_is_refused() -> None:
    with pytest.raises(UserError, match="dataset 1 is empty"):
        Mixture([("ab", 1.0), ("", 1.0)], 4)
    with pytest.raises(UserError, match="give weights >= 0"):
        Mixture([("ab", -1.0)], 4)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Ten rows in a Parquet file of three groups, an Arrow file and an Arrow stream."""
    table = pa.table(
        {
            "number": list(range(10)),
            "vector": [[float(i), float(-i)] for i in range(10)],
            "name": [f"row {i}" for i in range(10)],
        }
    )
    pq.write_table(table.slice(0, 6), tmp_path / "a.parquet", row_group_size=2)
    with pa.ipc.new_file(tmp_path / "b.arrow", table.schema) as file:
        file.write_table(table.slice(6, 3))
    with pa.ipc.new_stream(tmp_path / "c.arrow", table.schema) as stream:
        stream.write_table(table.slice(9, 1))
    return tmp_path


def test_rows_of_files_are_read_by_index(folder: Path) -> None:
    rows = ArrowDataset(folder)
    assert len(rows) == 10
    assert [rows[i]["number"] for i in (9, 0, 5, 6)] == [9, 0, 5, 6]
    assert rows[7]["name"] == "row 7"
    np.testing.assert_array_equal(rows[3]["vector"], [3.0, -3.0])
    with pytest.raises(IndexError):
        rows[10]
    assert pickle.loads(pickle.dumps(rows))[4]["number"] == 4
    assert list(ArrowDataset(folder / "*.parquet", columns=["name"])[1]) == ["name"]


def test_path_without_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="name a file or folder"):
        ArrowDataset(tmp_path)
