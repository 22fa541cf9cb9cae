"""What a rank asks storage for when it restores: independent of how many workers wrote."""

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
from elastic.reshard.checkpoint_shards import MAX_WRITERS, Writers, my_share
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
    """A folder whose reads are counted, by file."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.reads: list[str] = []

    def read(self, name: str, offset: int = 0, max_bytes: int | None = None) -> bytes:
        self.reads.append(name)
        return super().read(name, offset, max_bytes)


@cache
def whole(spec: TensorSpec) -> torch.Tensor:
    return draw(Normal(0.0, 1.0), spec.name, 0, spec.shape, Region.whole(spec.shape))


def saved(run: Path, layout: Layout, writers: set[str] | None = None) -> CountingStorage:
    """A checkpoint as the members of an assignment write it."""
    members = tuple(f"w{rank}" for rank in range(layout.num_workers))
    assignment, files = Assignment(1, layout, members), []
    for worker in sorted(writers or members):
        parts = {}
        for index in my_share(SPECS, assignment, writers or members, worker):
            region = region_of(SPECS[index], layout, assignment.coordinates(worker))
            assert region is not None
            parts[SPECS[index].name] = (region, whole(SPECS[index])[slices_of(region)].clone())
        place = DiskStorage(run).at(folder_of(7, 1))
        written = write_part(place, part_name(worker), parts)
        files.append(PartFile(part_name(worker), *astuple(written)))
    return CountingStorage(Path(publish(DiskStorage(run), 7, 1, files, layout, members)))


def wanted_by(layout: Layout, world_rank: int) -> dict[str, Region]:
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
    """One for the manifest and one for each file: of each region that the rank reads of, and one
    of what is not sharded."""
    requests = []
    for num_workers in (4, 16, 64):
        storage = saved(tmp_path / str(num_workers), layout_of(written, num_workers))
        layout, counts = layout_of(restored, num_workers), []
        for rank in {0, 1, layout.num_workers - 1}:
            storage.reads.clear()
            read_regions(storage, wanted_by(layout, rank), SPECS)
            counts.append(len(storage.reads))
        requests.append(max(counts))
    assert requests == [1 + num_files] * 3


def layout_of(text: str, num_workers: int) -> Layout:
    """Of a text in which W, W/2 and W/4 stand for as many workers."""
    for divisor in (4, 2):
        text = text.replace(f"W/{divisor}", str(num_workers // divisor))
    return Layout.parse(text.replace("W", str(num_workers)))


@pytest.mark.parametrize("num_replicas", [8, 64, 1024])
def test_a_large_model_is_written_by_at_most_eight_replicas_on_different_nodes(
    num_replicas: int,
) -> None:
    """The holders of one of 8 shards of 28 GB: with 8 ranks a node, one on each node."""
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


def test_a_checkpoint_of_version_3_is_read_with_one_more_request_for_each_file(
    tmp_path: Path,
) -> None:
    storage = saved(tmp_path, Layout(fsdp=2))
    manifest = json.loads(storage.read(MANIFEST))
    manifest["format_version"] = 3
    for file in manifest["files"].values():
        del file["header_bytes"]
    storage.write(MANIFEST, json.dumps(manifest).encode())
    storage.reads.clear()
    read = read_regions(storage, wanted_by(Layout(), 0), SPECS)
    assert all(torch.equal(read[spec.name], whole(spec)) for spec in SPECS)
    assert len(storage.reads) == 1 + 2 * 2


def test_pieces_that_lie_side_by_side_are_read_in_few_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """64 tensors of one block each, windows of 16 blocks, nothing read ahead with the header."""
    monkeypatch.setattr(part_file, "BLOCK_BYTES", 1 << 10)
    monkeypatch.setattr(part_file, "WINDOW_BYTES", 1 << 14)
    region = Region.whole((256,))
    tensors = {f"w{i:02}": torch.randn(256) for i in range(64)}
    storage = CountingStorage(tmp_path)
    written = write_part(storage, "part", {name: (region, t) for name, t in tensors.items()})
    opened = part_file.PartFileReader(storage, PartFile("part", *astuple(written)))
    for wanted, num_requests in ((sorted(tensors), 4), (["w00", "w01", "w63"], 2)):
        storage.reads.clear()
        read = {name: torch.empty(256) for name in wanted}
        opened.copy_all([(name, region, target) for name, target in read.items()])
        assert all(torch.equal(read[name], tensors[name]) for name in wanted)
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
def test_what_any_layout_wrote_is_read_under_any_other_from_the_files_that_have_it(
    tmp_path_factory, written: Layout, wanted: Layout, data: st.DataObject
) -> None:
    storage = saved(tmp_path_factory.mktemp("run"), written)
    regions = wanted_by(wanted, data.draw(st.integers(0, wanted.num_workers - 1)))
    read = read_regions(storage, regions, SPECS)
    by_name = {spec.name: spec for spec in SPECS}
    for name, region in regions.items():
        assert torch.equal(read[name], whole(by_name[name])[slices_of(region)])
    opened = {name for name in storage.reads if name.startswith("part-")}
    every = Checkpoint(storage)
    needed = {
        part
        for part in every._manifest.files
        for name, region in regions.items()
        for file, piece in every._pieces[name]
        if file._name == part.name and piece.region.intersection(region)
    }
    assert opened == {part.name for part in needed}


def test_survivors_that_save_for_the_lost_are_found(tmp_path: Path) -> None:
    storage = saved(tmp_path, Layout(dp=2, fsdp=2), writers={"w0", "w3"})
    regions = wanted_by(Layout(), 0)
    read = read_regions(storage, regions, SPECS)
    assert all(torch.equal(read[spec.name], whole(spec)) for spec in SPECS)


def test_a_model_whose_sharding_has_changed_since_is_read_from_the_headers(tmp_path: Path) -> None:
    storage = saved(tmp_path, Layout(fsdp=2, tp=2))
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
    assert torch.equal(read[SPECS[0].name], whole(SPECS[0])[200:256, 2:5])
