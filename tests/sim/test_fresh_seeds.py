"""A failing seed can be replayed, and runs each time once it is kept."""

from __future__ import annotations

from pathlib import Path

import pytest
from sim import fresh_seeds
from sim.fresh_seeds import SOAK, fresh, keep, kept


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "kept_seeds.txt"
    file.write_text("# test, seed, reason\ntest_a 7 # lost a vote\n")
    monkeypatch.setattr(fresh_seeds, "KEPT", file)
    monkeypatch.delenv("ELASTIC_SIM_SEED", raising=False)
    return file


def test_the_first_chunk_includes_kept_seeds(file: Path) -> None:
    base = fresh_seeds.base()
    assert list(fresh("test_a", 0, 2)) == [7, base, base + 1]
    assert list(fresh("test_a", 2, 2)) == [base + 2, base + 3]
    assert list(fresh("test_a", SOAK, 1)) == [7, base + SOAK]
    assert list(fresh("test_b", 0, 1)) == [base]


def test_a_replayed_seed_is_the_only_one(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ELASTIC_SIM_SEED", "123")
    assert list(fresh("test_a", 0, 50)) == [123]
    assert list(fresh("test_a", 50, 50)) == []


def test_a_seed_is_kept_once(file: Path) -> None:
    for _ in range(2):
        keep("test_b", 9)
    assert kept("test_b") == [9]
    assert file.read_text().count("test_b 9") == 1
    assert kept("test_a") == [7]
