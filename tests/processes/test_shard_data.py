"""A run on tar and MDS shards equals a plain loop over the same samples, through deaths."""

from __future__ import annotations

from pathlib import Path

import data_scripts
import pytest
import shard_scripts
from test_script_habits import run_habit

pytestmark = pytest.mark.slow


def test_losses_equal_those_of_samples_in_memory_through_deaths_and_a_reshard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (shards := tmp_path / "shards").mkdir()
    shard_scripts.write_shards(shards)
    monkeypatch.setenv(shard_scripts.SHARDS, str(shards))
    run = run_habit(tmp_path / "run", "from_shards", module=shard_scripts)
    expected = data_scripts.plain_losses(data_scripts.plain_in_sequence)
    assert list(run.losses().values()) == pytest.approx(list(expected), rel=1e-9)
    assert len(list((shards / "cache").iterdir())) == 3 + 3 + 3 + 1, "tars, indexes, shards, lock"
