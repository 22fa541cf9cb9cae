"""Output of a Ray Data dataset, written once and read by index."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from pipelines.custom_data.arrow import ArrowDataset
from pipelines.errors import UserError
from pipelines.settings.home import expand_home

DONE = "_WRITTEN"


class Writable(Protocol):
    """The part of `ray.data.Dataset` that is used here."""

    def write_parquet(self, path: str) -> Any: ...


def from_ray_dataset(dataset: Writable, folder: str | Path) -> ArrowDataset:
    """Write a `ray.data.Dataset` to Parquet files once, and open them as a map-style dataset.

    Training reads samples by index, which a `ray.data.Dataset` does not offer. All workers must
    see the folder. To write it again, delete it. Raises `UserError` if it holds other files, or
    those of an interrupted write.
    """
    folder = expand_home(folder).resolve()
    if not (folder / DONE).exists():
        if folder.exists() and any(folder.iterdir()):
            raise UserError(
                f"{folder}: has other files, or an incompletely written dataset; delete it or "
                "name another folder"
            )
        dataset.write_parquet(str(folder))
        (folder / DONE).touch()
    return ArrowDataset(folder)
