"""Checkpoint parts: tensors in safetensors, the index of each file in its JSON header.

The files are in the format of the Hugging Face storage of `torch.distributed.checkpoint` (DCP),
whose reader and plans are used here, so `dcp.load` reads them as well. Nothing here reads or
writes a pickle, or talks to another process.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, HuggingFaceStorageReader, LoadPlan
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from actors.checkpoints import MANIFEST
from elastic.regions import Region
from pipelines.errors import UserError

OFFSETS = "DCP_SHARDING_INFO"
"""The header field in which DCP's Hugging Face storage keeps where each tensor begins."""


def write_part(file: Path, parts: Mapping[str, tuple[Region, Tensor]]) -> None:
    """Write one worker's regions to one file and flush it to the disk.

    Raises `OSError` if the disk refuses, `ValueError` if a tensor has not its region's shape.
    """
    for name, (region, tensor) in parts.items():
        if tuple(tensor.shape) != region.shape:
            raise ValueError(f"{name}: a tensor of {tuple(tensor.shape)} for {region}")
    offsets = {name: {"saved_offsets": region.offsets} for name, (region, _) in parts.items()}
    tensors = {name: tensor.detach().contiguous() for name, (_, tensor) in parts.items()}
    try:
        save_file(tensors, file, metadata={"format": "pt", OFFSETS: json.dumps(offsets)})
    except SafetensorError as error:
        raise OSError(f"{file}: cannot be written ({error})") from error
    with file.open("rb") as written:
        os.fsync(written.fileno())


def read_regions(folder: Path, wanted: Mapping[str, Region]) -> dict[str, Tensor]:
    """Read regions from a whole checkpoint, whatever layout wrote it: of each file only the
    slices that overlap.

    Raises `UserError` if the checkpoint is damaged or does not hold all of them.
    """
    try:
        reader = HuggingFaceStorageReader(str(folder))
        reader.fs = _Listed(json.loads((folder / MANIFEST).read_text())["files"])
        metadata = reader.read_metadata()
        reader.set_up_storage_reader(metadata, is_coordinator=True)
        items: list[ReadItem] = []
        regions: dict[str, Tensor] = {}
        for name, region in wanted.items():
            stored = metadata.state_dict_metadata.get(name)
            if not isinstance(stored, TensorStorageMetadata):
                raise UserError(f"{folder}: holds no {name}: the checkpoint of another model")
            regions[name] = torch.empty(region.shape, dtype=stored.properties.dtype)
            items += _reads(folder, name, region, stored)
        reader.read_data(LoadPlan(items), _IntoRegions(regions)).wait()
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise UserError(f"{folder}: cannot be read as a checkpoint ({error})") from error
    return regions


class _Listed(FileSystem):
    """A folder in which nothing is seen but the files that its manifest names: a worker that
    died may have left half a part."""

    def __init__(self, files: Iterable[str]) -> None:
        self.files = list(files)

    def ls(self, path: str | os.PathLike[str]) -> list[str]:
        return [str(Path(path) / name) for name in self.files]


class _IntoRegions(DefaultLoadPlanner):
    """Tells the reader where each read goes: into its tensor's region."""

    def __init__(self, regions: dict[str, Tensor]) -> None:
        super().__init__()
        self.state_dict = regions

    def lookup_tensor(self, index: object) -> Tensor:
        return self.state_dict[index.fqn]


def _reads(
    folder: Path, name: str, region: Region, stored: TensorStorageMetadata
) -> list[ReadItem]:
    if not region.num_elements:
        return []
    chunk = ChunkStorageMetadata(torch.Size(region.offsets), torch.Size(region.shape))
    items = create_read_items_for_chunk_list(name, stored, [chunk])
    num_found = sum(prod(item.lengths) for item in items)
    if num_found != region.num_elements:
        raise UserError(
            f"{folder}: holds {num_found} of {region.num_elements} elements of {name} at "
            f"{region.offsets}: parts are missing or doubled"
        )
    return items
