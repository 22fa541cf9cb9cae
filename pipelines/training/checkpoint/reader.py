"""Reading a checkpoint: any regions out of the parts that any layout has written.

Nothing here reads or writes a pickle, or talks to another process.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from actors.storage.checkpoint_files import part_name, read_manifest
from actors.storage.storage import Storage
from elastic.geometry.regions import Region
from elastic.geometry.tensor_specs import TensorSpec
from elastic.reshard.checkpoint_shards import writers_of
from pipelines.settings.errors import UserError
from pipelines.training.checkpoint.part_file import WINDOW_BYTES, FilePiece, PartFileReader

NUM_READERS = 4
"""Files that are read at a time: an object store answers each request late, but many at once."""
AHEAD_BYTES = 1 << 23
"""What is read of a file's data with its header, if few files are opened: it saves a request, which
takes an object store as long as some such bytes."""


class Checkpoint:
    """A checkpoint in a folder, opened: it is known which files have which pieces.

    All methods raise `DamagedCheckpoint` if it is not what was written, `OSError` if the storage
    refuses.
    """

    def __init__(self, storage: Storage, specs: Sequence[TensorSpec] = ()) -> None:
        """With the `specs` of the state that was saved only the files are opened that have some of
        what is read; without them all are."""
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
            ahead_bytes = min(AHEAD_BYTES, WINDOW_BYTES // max(1, len(files)))
            opened = [readers.submit(PartFileReader, self._storage, f, ahead_bytes) for f in files]
            for file in [one.result() for one in opened]:
                for name, piece in file.pieces.items():
                    self._pieces.setdefault(name, []).append((file, piece))

    def _open_what_has(self, wanted: Mapping[str, Region]) -> None:
        """By the layout that wrote it; a file that turns out to have something else has been
        written by another version of the model, whose regions only the headers tell."""
        layout, members = self._manifest.layout, self._manifest.members
        writers = [member for member in members if part_name(member) in self._listed]
        if len(members) == layout.num_workers and writers:
            found = writers_of(self._specs, layout, members, writers, wanted)
            self._open({part_name(writer) for writer in found})
        if not all(self._has(name, region) for name, region in wanted.items()):
            self._open(set(self._listed))

    def _has(self, name: str, region: Region) -> bool:
        boxes = (box for _, box, _ in _overlaps(self._pieces.get(name, []), region))
        return sum(box.num_elements for box in boxes) == region.num_elements

    def wholes(self) -> dict[str, Region]:
        """All of each tensor, as far as its pieces reach."""
        wholes = {}
        for name, pieces in self._pieces.items():
            ends = [
                [first + length for first, length in zip(r.offsets, r.shape, strict=True)]
                for r in (piece.region for _, piece in pieces)
            ]
            wholes[name] = Region.whole(tuple(map(max, zip(*ends, strict=True))))
        return wholes

    def read(self, wanted: Mapping[str, Region]) -> dict[str, Tensor]:
        """Regions, whatever layout wrote them: of each file only the blocks that overlap, and each
        checked. Raises `UserError` if it is a checkpoint of something else."""
        if self._listed:
            self._open_what_has(wanted)
        reads: dict[PartFileReader, list[tuple[str, Region, Tensor]]] = {}
        regions: dict[str, Tensor] = {}
        for name, region in wanted.items():
            pieces = self._pieces.get(name)
            if pieces is None:
                raise UserError(f"{self._url}: holds no {name}: the checkpoint of another model")
            regions[name] = torch.empty(region.shape, dtype=pieces[0][1].dtype)
            num_found = 0
            for file, box, place in _overlaps(pieces, region):
                num_found += box.num_elements
                reads.setdefault(file, []).append((name, box, regions[name][place]))
            if num_found != region.num_elements:
                raise UserError(
                    f"{self._url}: holds {num_found} of {region.num_elements} elements of {name} "
                    f"at {region.offsets}: parts are missing or doubled"
                )
        if len(reads) > 1:
            with ThreadPoolExecutor(NUM_READERS) as readers:
                list(readers.map(_copy_all, reads.items()))
        else:  # each thread would have memory of its own
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
    """The files that have some of a region, the box within their piece, and where it belongs."""
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
