"""Saving and loading of tensor regions with torch.distributed.checkpoint (DCP).

A DTensor can express a region only if each axis of its mesh shards another dim. DCP gets the chunks
of any tensor from three methods, which are all that it uses of a DTensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from elastic.geometry.regions import Region


class Part(torch.Tensor):
    """A rank's region of one logical tensor."""

    local: torch.Tensor
    full: torch.Size
    chunk: ChunkStorageMetadata

    @classmethod
    def from_region(cls, local: torch.Tensor, region: Region, shape: tuple[int, ...]) -> Part:
        part = local.as_subclass(cls)
        part.local, part.full = local, torch.Size(shape)
        part.chunk = ChunkStorageMetadata(torch.Size(region.offsets), torch.Size(region.shape))
        return part

    def size(self) -> torch.Size:
        """The size of the logical tensor, which DCP compares with its metadata."""
        return self.full

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self.local)
        data = TensorWriteData(self.chunk, properties, self.full)
        return [WriteItem(MetadataIndex(fqn, self.chunk.offsets), WriteItemType.SHARD, None, data)]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [self.chunk]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        return self.local


def save(folder: Path, parts: Mapping[str, Part]) -> None:
    """Save with all ranks of the default group; replicas are written once."""
    dcp.save(dict(parts), checkpoint_id=str(folder))


def load(folder: Path, parts: Mapping[str, Part]) -> None:
    """Load with all ranks, each into its own parts."""
    dcp.load(dict(parts), checkpoint_id=str(folder))
