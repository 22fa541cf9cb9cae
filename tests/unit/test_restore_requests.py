"""The number of read requests of a restoring rank does not depend on the number of writers."""

from __future__ import annotations

import json
from dataclasses import astuple
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from actors.storage.checkpoint_files import MANIFEST, folder_of, part_name, publish
from actors.storage.storage import DiskStorage
from elastic.geometry.assignment import Assignment
from elastic.geometry.layout import Layout
from elastic.geometry.regions import Region
from elastic.geometry.shard_map import region_of
from elastic.geometry.tensor_specs import TensorSpec
from elastic.protocol.events import PartFile
from elastic.reshard.checkpoint_shards import MAX_WRITERS, Writers, tensors_to_write
from pipelines.training.checkpoint import part_file
from pipelines.training.checkpoint.part_file import write_part
from pipelines.training.checkpoint.reader import Checkpoint, read_regions
from pipelines.training.workload.initial_values import Normal, draw, slices_of

NUM_LAYERS = 4
SPECS = (
    *(
        TensorSpec(
            f"layers.{layer}.{name}",
            (256, 8),
            layer=layer,
            fsdp_dim=0,
            tp_dim=tp_dim,
            layer_costs=(1,) * NUM_LAYERS,
        )
        for layer in range(NUM_LAYERS)
        for name, tp_dim in (("up", 0), ("down", 1), ("gate", None))
    ),
    TensorSpec("running_mean", (8,), kind="buffer"),
    TensorSpec("optimizer.step", (), kind="optimizer"),
)


class CountingStorage(DiskStorage):
    """A folder that counts reads by file."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.reads: list[str] = []

    def read(self, name: str, offset: int = 0, max_bytes: int | None = None) -> bytes:
        self.reads.append(name)
        return super().read(name, offset, max_bytes)


@cache
def full_tensor(spec: TensorSpec) -> torch.Tensor:
    return draw(Normal(0.0, 1.0), spec.name, 0, spec.shape, Region.whole(spec.shape))


def write_checkpoint(run: Path, layout: Layout, writers: set[str] | None = None) -> CountingStorage:
    """Write a checkpoint as the members of an assignment do."""
    members = tuple(f"w{rank}" for rank in range(layout.num_workers))
    assignment, files = Assignment(1, layout, members), []
    for worker in sorted(writers or members):
        parts = {}
        for index in tensors_to_write(SPECS, assignment, writers or members, worker):
            region = region_of(SPECS[index], layout, assignment.coordinates(worker))
            assert region is not None
            parts[SPECS[index].name] = (
                region,
                full_tensor(SPECS[index])[slices_of(region)].clone(),
            )
        folder = DiskStorage(run).at(folder_of(7, 1))
        part_info = write_part(folder, part_name(worker), parts)
        files.append(PartFile(part_name(worker), *astuple(part_info)))
    return CountingStorage(Path(publish(DiskStorage(run), 7, 1, files, layout, members)))


def regions_of_rank(layout: Layout, world_rank: int) -> dict[str, Region]:
    regions = {s.name: region_of(s, layout, layout.coordinates(world_rank)) for s in SPECS}
    return {name: region for name, region in regions.items() if region is not None}


@pytest.mark.parametrize(
    ("written", "restored", "num_files"),
    [
        ("fsdp=W", "fsdp=W", 2),
        ("fsdp=W", "fsdp=W/2", 3),
        ("dp=W", "dp=W", 1),
        ("dp=W", "fsdp=W", 1),
        ("dp=W", "pp=4,dp=W/4", 1),
        ("dp=W/2,fsdp=2", "dp=W/2,fsdp=2", 2),
        ("dp=W/2,fsdp=2", "dp=W", 2),
        ("dp=2,fsdp=W/2", "dp=2,fsdp=W/2", 2),
        ("pp=4,dp=W/4", "pp=4,dp=W/4", 2),
        ("pp=4,dp=W/4", "dp=W", 4),
        ("pp=2,fsdp=W/2", "pp=2,fsdp=W/2", 2),
    ],
)
def test_requests_of_a_rank_do_not_depend_on_the_number_of_workers(
    tmp_path: Path, written: str, restored: str, num_files: int
) -> None:
    """One request for the manifest and one for each file: those of the regions that the rank reads
    and one for tensors that are not sharded."""
    requests = []
    for num_workers in (4, 16, 64):
        storage = write_checkpoint(tmp_path / str(num_workers), layout_of(written, num_workers))
        layout, counts = layout_of(restored, num_workers), []
        for rank in {0, 1, layout.num_workers - 1}:
            storage.reads.clear()
            read_regions(storage, regions_of_rank(layout, rank), SPECS)
            counts.append(len(storage.reads))
        requests.append(max(counts))
    assert requests == [1 + num_files] * 3


def layout_of(text: str, num_workers: int) -> Layout:
    """The layout of a text in which W, W/2 and W/4 mean as many workers."""
    for divisor in (4, 2):
        text = text.replace(f"W/{divisor}", str(num_workers // divisor))
    return Layout.parse(text.replace("W", str(num_workers)))


@pytest.mark.parametrize("num_replicas", [8, 64, 1024])
def test_large_model_is_written_by_at_most_eight_replicas_on_different_nodes(
    num_replicas: int,
) -> None:
    """Of each of 8 shards (28 GB in all) one holder is on each node of 8 ranks."""
    specs = [TensorSpec(f"w{i}", (4096, 4096), fsdp_dim=0) for i in range(417)]
    layout = Layout(dp=num_replicas, fsdp=8)
    members = [f"w{rank}" for rank in range(layout.num_workers)]
    nodes = set()
    for shard in range(8):
        writers = Writers(specs, layout, members, members)
        ranks = {writers.writer(index, shard) for index in range(len(specs))}
        assert len(ranks) == min(num_replicas, MAX_WRITERS) == len({rank // 8 for rank in ranks})
        nodes |= {rank // 8 for rank in ranks}
    assert len(nodes) == min(num_replicas, 64), "the writers of all shards share the work"


def test_checkpoint_of_version_3_takes_one_more_request_per_file(
    tmp_path: Path,
) -> None:
    storage = write_checkpoint(tmp_path, Layout(fsdp=2))
    manifest = json.loads(storage.read(MANIFEST))
    manifest["format_version"] = 3
    for file in manifest["files"].values():
        del file["header_bytes"]
    storage.write(MANIFEST, json.dumps(manifest).encode())
    storage.reads.clear()
    read = read_regions(storage, regions_of_rank(Layout(), 0), SPECS)
    assert all(torch.equal(read[spec.name], full_tensor(spec)) for spec in SPECS)
    assert len(storage.reads) == 1 + 2 * 2


def test_adjacent_pieces_are_read_in_few_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """64 tensors of one block each, windows of 16 blocks, no data read with the header."""
    monkeypatch.setattr(part_file, "BLOCK_BYTES", 1 << 10)
    monkeypatch.setattr(part_file, "WINDOW_BYTES", 1 << 14)
    region = Region.whole((256,))
    tensors = {f"w{i:02}": torch.randn(256) for i in range(64)}
    storage = CountingStorage(tmp_path)
    part_info = write_part(storage, "part", {name: (region, t) for name, t in tensors.items()})
    reader = part_file.PartFileReader(storage, PartFile("part", *astuple(part_info)))
    for names, num_requests in ((sorted(tensors), 4), (["w00", "w01", "w63"], 2)):
        storage.reads.clear()
        tensors_read = {name: torch.empty(256) for name in names}
        reader.copy_all([(name, region, target) for name, target in tensors_read.items()])
        assert all(torch.equal(tensors_read[name], tensors[name]) for name in names)
        assert len(storage.reads) == num_requests


LAYOUTS = [
    Layout(),
    Layout(dp=4),
    Layout(fsdp=8),
    Layout(dp=2, fsdp=4),
    Layout(pp=2, dp=2, tp=2),
    Layout(pp=4, fsdp=2),
    Layout(fsdp=4, tp=2),
]


@given(st.sampled_from(LAYOUTS), st.sampled_from(LAYOUTS), st.data())
def test_checkpoint_of_any_layout_is_read_under_any_other_from_the_files_that_hold_it(
    tmp_path_factory, written: Layout, restored: Layout, data: st.DataObject
) -> None:
    storage = write_checkpoint(tmp_path_factory.mktemp("run"), written)
    regions = regions_of_rank(restored, data.draw(st.integers(0, restored.num_workers - 1)))
    read = read_regions(storage, regions, SPECS)
    by_name = {spec.name: spec for spec in SPECS}
    for name, region in regions.items():
        assert torch.equal(read[name], full_tensor(by_name[name])[slices_of(region)])
    opened_files = {name for name in storage.reads if name.startswith("part-")}
    checkpoint = Checkpoint(storage)
    needed = {
        part
        for part in checkpoint._manifest.files
        for name, region in regions.items()
        for file, piece in checkpoint._pieces[name]
        if file._name == part.name and piece.region.intersection(region)
    }
    assert opened_files == {part.name for part in needed}


def test_checkpoint_written_only_by_survivors_is_complete(tmp_path: Path) -> None:
    storage = write_checkpoint(tmp_path, Layout(dp=2, fsdp=2), writers={"w0", "w3"})
    regions = regions_of_rank(Layout(), 0)
    read = read_regions(storage, regions, SPECS)
    assert all(torch.equal(read[spec.name], full_tensor(spec)) for spec in SPECS)


def test_checkpoint_with_another_sharding_is_read_from_the_headers(tmp_path: Path) -> None:
    storage = write_checkpoint(tmp_path, Layout(fsdp=2, tp=2))
    changed = tuple(
        TensorSpec(
            spec.name,
            spec.shape,
            layer=spec.layer,
            fsdp_dim=1,
            tp_dim=None,
            layer_costs=spec.layer_costs,
        )
        for spec in SPECS
    )
    read = read_regions(storage, {SPECS[0].name: Region((200, 2), (56, 3))}, changed)
    assert torch.equal(read[SPECS[0].name], full_tensor(SPECS[0])[200:256, 2:5])
