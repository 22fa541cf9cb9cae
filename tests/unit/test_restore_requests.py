"""What a rank asks storage for when it restores: independent of how many workers wrote."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from actors.checkpoints import folder_of, part_name, publish
from actors.storage import DiskStorage
from elastic.assignment import Assignment
from elastic.events import PartFile
from elastic.layout import Layout
from elastic.parts import my_share
from elastic.regions import Region
from elastic.shards import region_of
from elastic.specs import TensorSpec
from pipelines.training.checkpoint import Checkpoint, read_regions
from pipelines.training.initial_values import Normal, draw, slices_of
from pipelines.training.part_file import write_part

NUM_LAYERS = 4
SPECS = tuple(
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
)


class CountingStorage(DiskStorage):
    """A folder whose reads are counted, by file."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.reads: list[str] = []

    def read(self, name: str, offset: int = 0, max_bytes: int | None = None) -> bytes:
        self.reads.append(name)
        return super().read(name, offset, max_bytes)


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
        files.append(PartFile(part_name(worker), written.num_bytes, written.checksum))
    return CountingStorage(Path(publish(DiskStorage(run), 7, 1, files, layout, members)))


def wanted_by(layout: Layout, world_rank: int) -> dict[str, Region]:
    regions = {s.name: region_of(s, layout, layout.coordinates(world_rank)) for s in SPECS}
    return {name: region for name, region in regions.items() if region is not None}


@pytest.mark.parametrize("narrowing", [1, 2])
def test_requests_of_a_rank_do_not_depend_on_the_number_of_workers(
    tmp_path: Path, narrowing: int
) -> None:
    """Sharded over 4, 16 and 64 workers; restored by as many, and by half as many."""
    requests = set()
    for num_workers in (4, 16, 64):
        storage = saved(tmp_path / str(num_workers), Layout(fsdp=num_workers))
        for rank in (0, 1, num_workers // narrowing - 1):
            storage.reads.clear()
            restoring = Layout(fsdp=num_workers // narrowing)
            read_regions(storage, wanted_by(restoring, rank), SPECS)
            requests.add(len(storage.reads))
    assert len(requests) == 1, requests
    assert requests.pop() <= 1 + 3 * narrowing  # the manifest; of each file length, header, data


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
