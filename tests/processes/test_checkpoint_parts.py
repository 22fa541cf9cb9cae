"""Checkpoint shards: any regions can be read from any others, and no pickle is opened."""

from __future__ import annotations

import json
import os
import pickle
import warnings
from dataclasses import astuple
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch.distributed.checkpoint import HuggingFaceStorageReader

from actors.storage.checkpoint_files import find_checkpoints, folder_of, publish
from actors.storage.errors import DamagedCheckpoint
from actors.storage.storage import DiskStorage
from elastic.geometry.layout import Layout
from elastic.geometry.regions import Region
from elastic.geometry.shard_map import region_of, sharding_of
from elastic.geometry.tensor_specs import TensorSpec
from elastic.protocol.events import PartFile
from pipelines.errors import UserError
from pipelines.training.checkpoint import part_file
from pipelines.training.checkpoint.part_file import write_part
from pipelines.training.checkpoint.reader import read_regions

SPECS = (
    TensorSpec("layers.0.weight", (7, 3), "float32", layer=0, fsdp_dim=0, layer_costs=(1,)),
    TensorSpec("norm.weight", (2,), "float64", fsdp_dim=0),
    TensorSpec("half", (4, 2), "bfloat16", fsdp_dim=0),
    TensorSpec("optimizer.norm.weight.step", (), "float32", kind="optimizer"),
    TensorSpec("count", (3,), "int64", kind="buffer"),
)
LAYOUTS = st.builds(Layout, dp=st.integers(1, 3), fsdp=st.integers(1, 5))


def make_full_tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        spec.name: (1000 * torch.randn(spec.shape, generator=generator)).to(
            getattr(torch, spec.dtype)
        )
        for spec in SPECS
    }


def slice_region(tensor: torch.Tensor, region: Region) -> torch.Tensor:
    pairs = zip(region.offsets, region.shape, strict=True)
    return tensor[tuple(slice(first, first + length) for first, length in pairs)]


def write_checkpoint(run_folder: Path, layout: Layout) -> Path:
    """Write a complete checkpoint; the first holder of each region writes it."""
    tensors = make_full_tensors()
    run = DiskStorage(run_folder)
    files = []
    for world_rank in range(layout.num_workers):
        coordinates = layout.coordinates(world_rank)
        parts = {}
        for spec in SPECS:
            if sharding_of(spec, layout).first_holder(world_rank) == world_rank:
                region = region_of(spec, layout, coordinates)
                parts[spec.name] = (region, slice_region(tensors[spec.name], region))
        name = f"part-w{world_rank}.safetensors"
        written = write_part(run.at(folder_of(3, 2)), name, parts)
        files.append(PartFile(name, *astuple(written)))
    return Path(publish(run, 3, 2, files))


@settings(max_examples=25, deadline=None)
@given(source=LAYOUTS, target=LAYOUTS, data=st.data())
def test_checkpoint_of_any_layout_is_read_under_any_other(
    tmp_path_factory, source, target, data
) -> None:
    folder = write_checkpoint(tmp_path_factory.mktemp("run"), source)
    world_rank = data.draw(st.integers(0, target.num_workers - 1))
    coordinates = target.coordinates(world_rank)
    regions = {spec.name: region_of(spec, target, coordinates) for spec in SPECS}
    read = read_regions(DiskStorage(folder), regions)
    full_tensors = make_full_tensors()
    for spec in SPECS:
        expected = slice_region(full_tensors[spec.name], regions[spec.name])
        assert read[spec.name].dtype == expected.dtype
        assert torch.equal(read[spec.name], expected), spec.name


def test_only_requested_tensors_are_read(tmp_path) -> None:
    folder = write_checkpoint(tmp_path, Layout(fsdp=2))
    read = read_regions(DiskStorage(folder), {"layers.0.weight": Region((2, 1), (3, 2))})
    expected = slice_region(make_full_tensors()["layers.0.weight"], Region((2, 1), (3, 2)))
    assert list(read) == ["layers.0.weight"]
    assert torch.equal(read["layers.0.weight"], expected)


def test_stock_dcp_and_safetensors_read_the_same_files(tmp_path) -> None:
    folder = write_checkpoint(tmp_path, Layout(fsdp=2))
    full_tensors = make_full_tensors()
    loaded = {name: torch.zeros_like(tensor) for name, tensor in full_tensors.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(loaded, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in full_tensors.items())
    first = load_file(folder / "part-w0.safetensors")
    assert torch.equal(first["layers.0.weight"], full_tensors["layers.0.weight"][:4])


class Malicious:
    """A pickle that creates a folder when it is opened."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.mark),)


def test_pickles_in_the_folder_are_never_opened(tmp_path) -> None:
    folder = write_checkpoint(tmp_path, Layout(dp=2, fsdp=2))
    mark = tmp_path / "opened"
    poison = pickle.dumps(Malicious(mark))
    for name in (".metadata", "__0_0.distcp", "part-w9.safetensors", "model.pt"):
        (folder / name).write_bytes(poison)
    read = read_regions(
        DiskStorage(folder), {spec.name: Region.whole(spec.shape) for spec in SPECS}
    )
    assert torch.equal(read["half"], make_full_tensors()["half"])
    assert not mark.exists()
    pickle.loads(poison)
    assert mark.exists()


@pytest.mark.parametrize("name", ["layers.0.bias", "layers.0.weight"])
def test_missing_tensor_or_region_is_a_user_error(tmp_path, name) -> None:
    folder = write_checkpoint(tmp_path, Layout())
    with pytest.raises(UserError, match=name):
        read_regions(DiskStorage(folder), {name: Region((0, 0), (8, 3))})


def test_missing_shard_is_reported(tmp_path) -> None:
    folder = write_checkpoint(tmp_path, Layout(fsdp=2))
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest["files"]["part-w1.safetensors"]
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(UserError, match="shards are missing"):
        read_regions(DiskStorage(folder), {"layers.0.weight": Region((0, 0), (7, 3))})


@pytest.mark.parametrize("num_bytes", [0, 4, 100])
def test_truncated_shard_is_reported(tmp_path, num_bytes) -> None:
    folder = write_checkpoint(tmp_path, Layout())
    file = folder / "part-w0.safetensors"
    file.write_bytes(file.read_bytes()[:num_bytes])
    with pytest.raises(DamagedCheckpoint, match="step-00000003-g2/part-w0"):
        read_regions(DiskStorage(folder), {"norm.weight": Region((0,), (2,))})


def test_a_folder_without_a_manifest_is_no_checkpoint(tmp_path) -> None:
    with pytest.raises(DamagedCheckpoint, match="manifest"):
        read_regions(DiskStorage(tmp_path), {})


def test_tensor_of_another_shape_than_its_region_is_refused(tmp_path) -> None:
    with pytest.raises(ValueError, match="norm"):
        parts = {"norm": (Region((0,), (2,)), torch.zeros(3))}
        write_part(DiskStorage(tmp_path), "p.safetensors", parts)


def test_failing_disk_raises_os_error(tmp_path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        write_part(DiskStorage(tmp_path / "file"), "p.safetensors", {})


@given(place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
@settings(max_examples=150, deadline=None)
def test_flipped_bit_anywhere_is_reported_with_its_file(
    small_blocks, place: float, bit: int
) -> None:
    """Also a bit in the padding of the header, which changes no tensor."""
    folder, content = small_blocks
    file = folder / "part-w1.safetensors"
    changed = bytearray(content)
    changed[int(place * len(content))] ^= 1 << bit
    file.write_bytes(changed)
    regions = {spec.name: Region.whole(spec.shape) for spec in SPECS}
    with pytest.raises(DamagedCheckpoint, match=r"part-w1\.safetensors: "):
        read_regions(DiskStorage(folder), regions)
    file.write_bytes(content)
    full_tensors = make_full_tensors()
    read = read_regions(DiskStorage(folder), regions)
    assert all(torch.equal(read[name], full_tensors[name]) for name in full_tensors)


@pytest.fixture(scope="module")
def small_blocks(tmp_path_factory) -> tuple[Path, bytes]:
    """A checkpoint of two shards in blocks of 16 bytes, and the content of the second."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(part_file, "BLOCK_BYTES", 16)
        folder = write_checkpoint(tmp_path_factory.mktemp("run"), Layout(fsdp=2))
    return folder, (folder / "part-w1.safetensors").read_bytes()


def test_other_formats_are_refused_with_a_reason(tmp_path) -> None:
    folder = write_checkpoint(tmp_path, Layout())
    manifest = folder / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"format_version": 4', '"format_version": 5'))
    with pytest.raises(DamagedCheckpoint, match="format_version 5 is not supported"):
        read_regions(DiskStorage(folder), {})
    checkpoints = find_checkpoints(DiskStorage(tmp_path))
    assert not checkpoints.whole and "format_version 5" in checkpoints.complaints[0]
