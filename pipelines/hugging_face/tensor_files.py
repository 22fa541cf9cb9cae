"""Reader of the safetensors files in a `transformers` folder, region by region."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from elastic.geometry.regions import Region
from pipelines.errors import UserError

ONE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"


class TensorFiles:
    """The tensors of a folder's safetensors files; opening reads only the headers.

    Every method raises `UserError` if the files cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.places: dict[str, Path] = {}
        for name in self._files():
            with self._opened(folder / name) as file:
                self.places |= dict.fromkeys(file.keys(), folder / name)

    def slice(self, name: str, region: Region) -> Tensor:
        """A region of a tensor, on the host."""
        ends = zip(region.offsets, region.shape, strict=True)
        with self.opened(name) as whole:
            part: Tensor = whole[tuple(slice(first, first + length) for first, length in ends)]
        return part

    @contextmanager
    def opened(self, name: str) -> Iterator[Any]:
        """A tensor that can be sliced."""
        with self._opened(self.places[name]) as file:
            yield file.get_slice(name)

    @contextmanager
    def _opened(self, file: Path) -> Iterator[Any]:
        try:
            with safe_open(file, framework="pt") as opened:
                yield opened
        except (OSError, SafetensorError) as error:
            raise UserError(f"init_from={self.folder}: {file.name}: {error}") from None

    def _files(self) -> list[str]:
        index = self.folder / INDEX
        if index.is_file():
            try:
                return sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
            except (ValueError, KeyError, TypeError, AttributeError):
                raise UserError(
                    f"init_from: {index} is damaged; download or save the model again"
                ) from None
        if not (self.folder / ONE_FILE).is_file():
            raise UserError(
                f"init_from={self.folder}: has no {ONE_FILE}; other formats are not supported: "
                "save the model with `save_pretrained`"
            )
        return [ONE_FILE]


def has_weights(folder: Path) -> bool:
    """Whether a folder has a model's safetensors."""
    return (folder / ONE_FILE).is_file() or (folder / INDEX).is_file()
