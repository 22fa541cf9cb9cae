"""`init_from` at a URL: the values are those of the same folder on this machine."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
import torch
from models_on_disk import DENSE, llama, settings_for

from elastic.geometry.regions import Region
from pipelines.errors import DataUnreachable
from pipelines.hugging_face import transformer_from
from pipelines.run.program import TrainingProgram
from pipelines.settings import CacheSettings

URL = "memory://bucket/llama"


@pytest.fixture
def local(tmp_path: Path) -> Iterator[Path]:
    """A folder of weights in several files, which are in fsspec's store in memory, too."""
    llama().save_pretrained(tmp_path / "llama", max_shard_size="30KB")
    memory = fsspec.filesystem("memory")
    memory.store.clear()
    for file in (tmp_path / "llama").iterdir():
        memory.pipe(f"/bucket/llama/{file.name}", file.read_bytes())
    yield tmp_path / "llama"
    memory.store.clear()


def weights_from(place: str, cache: Path) -> dict[str, torch.Tensor]:
    settings = settings_for(DENSE, init_from=place, cache=CacheSettings(folder=str(cache)))
    program = TrainingProgram(settings.model_dump(mode="json"), device="cpu")
    return {
        spec.name: program.initial(spec, Region.whole(spec.shape))
        for spec in program.specs()
        if spec.kind == "parameter"
    }


def test_weights_at_a_url_are_those_of_the_folder_and_are_copied_once(
    local: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    here = weights_from(str(local), tmp_path / "cache")
    there = weights_from(URL, tmp_path / "cache")
    assert here and here.keys() == there.keys()
    for name, value in here.items():
        assert torch.equal(value, there[name])
    [copy] = [f for f in (tmp_path / "cache-folders").iterdir() if f.is_dir()]
    made = (copy / "config.json").stat().st_mtime_ns
    weights_from(URL, tmp_path / "cache")
    assert (copy / "config.json").stat().st_mtime_ns == made
    assert transformer_from(URL) == transformer_from(local)


def test_url_without_files_is_one_line(local: Path, tmp_path: Path) -> None:
    with pytest.raises(DataUnreachable, match=r"^memory://bucket/none: cannot be read \(there is"):
        weights_from("memory://bucket/none", tmp_path / "cache")
