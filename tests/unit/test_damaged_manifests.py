"""A checkpoint with an invalid manifest is skipped, and the others are found."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from actors.storage.checkpoint_files import (
    MANIFEST,
    find_checkpoints,
    folder_of,
    publish,
    read_manifest,
)
from actors.storage.errors import DamagedCheckpoint
from actors.storage.storage import DiskStorage

WHOLE = {"format_version": 4, "step": 8, "generation": 1, "layout": {}, "members": [], "files": {}}


@pytest.mark.parametrize(
    "content",
    [
        json.dumps(WHOLE | {"step": float("inf")}),
        json.dumps(WHOLE).replace('"step": 8', '"step": 1e400'),
        json.dumps(WHOLE | {"generation": float("-inf")}),
        json.dumps(WHOLE | {"step": float("nan")}),
        "[" * 99999,
        '{"format_version":' * 99999,
    ],
)
def test_manifest_with_impossible_numbers_or_depth_is_skipped(tmp_path: Path, content: str) -> None:
    run = DiskStorage(tmp_path)
    publish(run, 4, 1, ())
    publish(run, 8, 1, ())
    folder = folder_of(8, 1)
    run.write(f"{folder}/{MANIFEST}", content.encode())
    with pytest.raises(DamagedCheckpoint, match="not a valid manifest"):
        read_manifest(run.at(folder))
    checkpoints = find_checkpoints(run)
    assert [saved.step for saved in checkpoints.whole] == [4]
    assert checkpoints.damaged == (folder,) and len(checkpoints.complaints) == 1
