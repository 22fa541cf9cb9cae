"""What a Ray Data dataset has computed, written once and read by number."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from pipelines.custom_data.arrow import ArrowDataset
from pipelines.settings.errors import UserError
from pipelines.settings.home import expanded

DONE = "_WRITTEN"


class Writable(Protocol):
    """A `ray.data.Dataset`, as far as this needs it."""

    def write_parquet(self, path: str) -> Any: ...


def from_ray_dataset(dataset: Writable, folder: str | Path) -> ArrowDataset:
    """Write a `ray.data.Dataset` to Parquet files in a folder that all workers see, unless it has
    been, and read them map-style: every sample has a number, which training needs.

    Delete the folder to have it written anew. Raises `UserError` for one with other files in it,
    or those of a writing that was broken off.
    """
    folder = expanded(folder).resolve()
    if not (folder / DONE).exists():
        if folder.exists() and any(folder.iterdir()):
            raise UserError(
                f"{folder}: has files, but not those of a dataset that was written to its end; "
                "delete it, or name another folder"
            )
        dataset.write_parquet(str(folder))
        (folder / DONE).touch()
    return ArrowDataset(folder)
