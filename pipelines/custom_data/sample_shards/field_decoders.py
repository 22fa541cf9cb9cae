"""What the fields of samples in tar files become, by their names, as WebDataset decodes them."""

from __future__ import annotations

import gzip
import io
import json
import pickle
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch

from pipelines.custom_data.sample_shards.images import decoded_image
from pipelines.errors import UserError

Decoder = Callable[[bytes], Any]
PICKLES = {"pkl", "pickle", "pyd"}
GZIP = ".gz"
MAX_FIELD_BYTES = 4 << 30


def text(data: bytes) -> str:
    return data.decode()


def image(data: bytes) -> Any:
    """In RGB, as `decode("pil")` of WebDataset."""
    return decoded_image(data, "RGB")


def npy(data: bytes) -> Any:
    return np.load(io.BytesIO(data), allow_pickle=False)


def npz(data: bytes) -> dict[str, Any]:
    with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
        return dict(arrays)


def tensors(data: bytes) -> Any:
    """What `torch.save` has written, without running code of the file."""
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


DECODERS: dict[str, Decoder] = {
    **dict.fromkeys(("txt", "text", "transcript"), text),
    **dict.fromkeys(("cls", "cls2", "count", "index", "inx", "id"), int),
    **dict.fromkeys(("json", "jsn"), json.loads),
    **dict.fromkeys(("jpg", "jpeg", "png", "ppm", "pgm", "pbm", "bmp", "webp", "tiff"), image),
    "npy": npy,
    "npz": npz,
    "pth": tensors,
}


class FieldDecoders:
    """Decoders by the whole name of a field, such as `seg.png`, or its last part. `custom` come
    first. Fields of other names stay bytes."""

    def __init__(self, custom: Mapping[str, Decoder], allow_pickle: bool) -> None:
        self._custom = dict(custom)
        self._allow_pickle = allow_pickle

    def refuse_unsafe(self, names: Iterable[str], shown: str) -> None:
        """Raise `UserError` for fields that could run code, unless the user allows these."""
        for name in () if self._allow_pickle else names:
            kind = _kind(name.removesuffix(GZIP))
            if kind in PICKLES and self._custom_decoder(name, kind) is None:
                raise UserError(
                    f"{shown}: the field {name!r} is a pickle, which can run any code: leave it "
                    "out with fields=[...], or trust its author with allow_pickle=True"
                )

    def decode(self, name: str, data: bytes, where: str) -> Any:
        """The value of a field. Raises `UserError`, which begins with `where`, if it is damaged."""
        if (custom := self._custom_decoder(name, _kind(name))) is not None:
            return custom(data)
        if name.endswith(GZIP):
            try:
                inner = _decompressed(data)
            except Exception as error:  # whatever zlib raises for damaged content
                raise undecodable(f"{where}, field {name!r}", error) from error
            return self.decode(name.removesuffix(GZIP), inner, where)
        try:
            kind = _kind(name)
            if kind in PICKLES and self._allow_pickle:
                return pickle.loads(data)
            return DECODERS[kind](data) if kind in DECODERS else data
        except Exception as error:  # whatever a format raises for damaged content
            raise undecodable(f"{where}, field {name!r}", error) from error

    def _custom_decoder(self, name: str, kind: str) -> Decoder | None:
        return self._custom.get(name) or self._custom.get(kind)


def _decompressed(data: bytes) -> bytes:
    """Raises `ValueError` for a field that would fill the memory of a machine."""
    with gzip.GzipFile(fileobj=io.BytesIO(data)) as file:
        content = file.read(MAX_FIELD_BYTES + 1)
    if len(content) > MAX_FIELD_BYTES:
        raise ValueError(f"it is larger than {MAX_FIELD_BYTES >> 30} GiB when decompressed")
    return content


def undecodable(where: str, error: Exception) -> UserError:
    """The error for a field whose content is not what its name says."""
    reason = str(error).splitlines()[0] if str(error) else "no reason given"
    return UserError(
        f"{where}: cannot be decoded ({type(error).__name__}: {reason}); fix it or leave the "
        "sample out"
    )


def _kind(name: str) -> str:
    return name.rpartition(".")[2]
