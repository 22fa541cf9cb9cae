"""Images of samples, if Pillow is installed, which is no dependency."""

from __future__ import annotations

import importlib
import io
import sys
from functools import cache
from types import ModuleType
from typing import Any


@cache
def pillow() -> ModuleType | None:
    """Pillow's module of images. None, which a line reports: it is not installed."""
    try:
        return importlib.import_module("PIL.Image")
    except ImportError:
        line = "Pillow is not installed: images stay bytes; pip install pillow decodes them"
        print(f"elastic: {line}", file=sys.stderr, flush=True)
        return None


def decoded_image(data: bytes, mode: str | None = None) -> Any:
    """The image, converted to `mode` (None: as stored); the bytes without Pillow."""
    if (library := pillow()) is None:
        return data
    image = library.open(io.BytesIO(data))
    image.load()
    return image.convert(mode) if mode else image


def raw_image(mode: str, size: tuple[int, int], data: bytes) -> Any:
    """An image of these pixels; the pixels without Pillow."""
    library = pillow()
    return data if library is None else library.frombytes(mode, size, data)
