"""Reading of arbitrary regions from the shards of a checkpoint, whatever layout wrote them.

Nothing here unpickles, or communicates with another process.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from actors.storage.checkpoint_files import part_name, part_names, read_manifest
from actors.storage.storage import Storage
from elastic.geometry.regions import Region
from elastic.geometry.tensor_specs import TensorSpec
from elastic.reshard.checkpoint_shards import writers_of
from pipelines.errors import UserError
from pipelines.training.checkpoint.part_file import WINDOW_BYTES, FilePiece, PartFileReader

NUM_READERS = 4
"""Files read in parallel: an object store has a high latency but serves many requests at once."""
PREFETCH_BYTES = 1 << 23
"""Data bytes read together with a file's header, if few files are opened: this saves a request,
which costs an object store as much time as some 8 MiB."""


class Checkpoint:
    """An open checkpoint in a folder, with an index of the pieces in its files.

    All methods raise `DamagedCheckpoint` if the content is not what was written, `OSError` if the
    storage fails.
    """

    def __init__(self, storage: Storage, specs: Sequence[TensorSpec] = ()) -> None:
        """Open the checkpoint. With the `specs` of the saved state only the files that contain
        requested regions are opened, without them all files."""
        self._storage = storage
        self._url = storage.url
        self._specs = specs
        self._manifest = read_manifest(storage)
        self._listed = {file.name: file for file in self._manifest.files}
        self._pieces: dict[str, list[tuple[PartFileReader, FilePiece]]] = {}
        if not specs:
            self._open(set(self._listed))

    def _open(self, names: set[str]) -> None:
        """Read the headers of these files."""
        files = [self._listed.pop(name) for name in sorted(names & self._listed.keys())]
        with ThreadPoolExecutor(NUM_READERS) as readers:
            prefetch_bytes = min(PREFETCH_BYTES, WINDOW_BYTES // max(1, len(files)))
            futures = [
                readers.submit(PartFileReader, self._storage, file, prefetch_bytes)
                for file in files
            ]
            for file in [future.result() for future in futures]:
                for name, piece in file.pieces.items():
                    self._pieces.setdefault(name, []).append((file, piece))

    def _open_files_of(self, wanted: Mapping[str, Region]) -> None:
        """Open the files that contain these regions according to the layout that wrote them.

        If they do not, another version of the model wrote them; then all headers are read.
        """
        layout, members = self._manifest.layout, self._manifest.members
        writers = [member for member in members if part_name(member) in self._listed]
        if len(members) == layout.num_workers and writers:
            needed = writers_of(self._specs, layout, members, writers, wanted)
            self._open({name for writer in needed for name in part_names(writer, self._listed)})
        if not all(self._has(name, region) for name, region in wanted.items()):
            self._open(set(self._listed))

    def _has(self, name: str, region: Region) -> bool:
        boxes = (box for _, box, _ in _overlaps(self._pieces.get(name, []), region))
        return sum(box.num_elements for box in boxes) == region.num_elements

    def full_regions(self) -> dict[str, Region]:
        """The full region of each tensor, up to the end of its last piece."""
        full = {}
        for name, pieces in self._pieces.items():
            ends = [
                [first + length for first, length in zip(r.offsets, r.shape, strict=True)]
                for r in (piece.region for _, piece in pieces)
            ]
            full[name] = Region.whole(tuple(map(max, zip(*ends, strict=True))))
        return full

    def read(self, wanted: Mapping[str, Region]) -> dict[str, Tensor]:
        """Read regions, whatever layout wrote them.

        Only the blocks that overlap are read, and each is verified. Raises `UserError` if the
        checkpoint is of another model.
        """
        if self._listed:
            self._open_files_of(wanted)
        reads: dict[PartFileReader, list[tuple[str, Region, Tensor]]] = {}
        regions: dict[str, Tensor] = {}
        for name, region in wanted.items():
            pieces = self._pieces.get(name)
            if pieces is None:
                raise UserError(f"{self._url}: has no {name}: it is a checkpoint of another model")
            regions[name] = torch.empty(region.shape, dtype=pieces[0][1].dtype)
            num_found = 0
            for file, box, target in _overlaps(pieces, region):
                num_found += box.num_elements
                reads.setdefault(file, []).append((name, box, regions[name][target]))
            if num_found != region.num_elements:
                raise UserError(
                    f"{self._url}: has {num_found} of {region.num_elements} elements of {name} "
                    f"at {region.offsets}: shards are missing or duplicated"
                )
        if len(reads) > 1:
            with ThreadPoolExecutor(NUM_READERS) as readers:
                list(readers.map(_copy_all, reads.items()))
        else:  # a thread would have a malloc arena of its own
            list(map(_copy_all, reads.items()))
        return regions


def read_regions(
    storage: Storage, wanted: Mapping[str, Region], specs: Sequence[TensorSpec] = ()
) -> dict[str, Tensor]:
    """Read regions from the checkpoint in a folder; see `Checkpoint`."""
    return Checkpoint(storage, specs).read(wanted)


def _overlaps(
    pieces: list[tuple[PartFileReader, FilePiece]], region: Region
) -> Iterator[tuple[PartFileReader, Region, tuple[slice, ...]]]:
    """The files that overlap a region, the box within their piece, and the slices of its target."""
    for file, piece in pieces:
        common = piece.region.intersection(region)
        if common is not None:
            box = Region(_from(piece.region, common), common.shape)
            corner = zip(_from(region, common), common.shape, strict=True)
            yield file, box, tuple(slice(first, first + length) for first, length in corner)


def _from(outer: Region, inner: Region) -> tuple[int, ...]:
    return tuple(i - o for i, o in zip(inner.offsets, outer.offsets, strict=True))


def _copy_all(read: tuple[PartFileReader, list[tuple[str, Region, Tensor]]]) -> None:
    file, boxes = read
    file.copy_all(boxes)
