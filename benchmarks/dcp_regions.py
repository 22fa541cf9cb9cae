"""Save and load regions of tensors by torch.distributed.checkpoint, as DTensors are.

A DTensor can say the same only where each axis of its mesh cuts another dim; DCP asks any tensor
for its chunks by three methods, which are all that it uses of a DTensor.
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
    whole: torch.Size
    chunk: ChunkStorageMetadata

    @classmethod
    def of(cls, local: torch.Tensor, region: Region, shape: tuple[int, ...]) -> Part:
        part = local.as_subclass(cls)
        part.local, part.whole = local, torch.Size(shape)
        part.chunk = ChunkStorageMetadata(torch.Size(region.offsets), torch.Size(region.shape))
        return part

    def size(self) -> torch.Size:
        """The logical tensor's: what DCP compares with its metadata."""
        return self.whole

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self.local)
        data = TensorWriteData(self.chunk, properties, self.whole)
        return [WriteItem(MetadataIndex(fqn, self.chunk.offsets), WriteItemType.SHARD, None, data)]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [self.chunk]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        return self.local


def save(folder: Path, parts: Mapping[str, Part]) -> None:
    """All ranks of the default group save together; copies are written once."""
    dcp.save(dict(parts), checkpoint_id=str(folder))


def load(folder: Path, parts: Mapping[str, Part]) -> None:
    """All ranks load together, each into its own parts."""
    dcp.load(dict(parts), checkpoint_id=str(folder))
