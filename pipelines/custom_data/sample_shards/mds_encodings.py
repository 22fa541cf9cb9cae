"""The encodings of columns in MDS shards, by their names, as MosaicML Streaming decodes them."""

from __future__ import annotations

import json
import pickle
import struct
from collections.abc import Callable
from decimal import Decimal
from functools import partial
from math import prod
from typing import Any

import numpy as np

from pipelines.custom_data.sample_shards.images import decoded_image, raw_image

Decode = Callable[[bytes], Any]
PICKLE = "pkl"
SHAPE_DTYPES = ("<u1", "<u2", "<u4", "<u8")
VALUE_DTYPES = {
    **{8: "uint8", 9: "int8", 16: "uint16", 17: "int16", 18: "float16"},
    **{32: "uint32", 33: "int32", 34: "float32", 64: "uint64", 65: "int64", 66: "float64"},
}
"""The number of each dtype in an array whose column has none."""


def scalar(dtype: str, data: bytes) -> Any:
    [value] = np.frombuffer(data, np.dtype(dtype))
    return value


def whole(data: bytes) -> int:
    return int(scalar("int64", data))


def text(data: bytes) -> str:
    return data.decode()


def array(dtype: str | None, shape: tuple[int, ...] | None, data: bytes) -> Any:
    """An array whose dtype and shape are the column's, or else stand before its values."""
    begin = 0
    if dtype is None:
        dtype, begin = VALUE_DTYPES[data[0]], 1
    if shape is None:
        num_dims, kind = data[begin] >> 2, SHAPE_DTYPES[data[begin] & 3]
        end = begin + 1 + num_dims * np.dtype(kind).itemsize
        shape = tuple(np.frombuffer(data[begin + 1 : end], kind).tolist())
        begin = end
    values = np.frombuffer(data, dtype, offset=begin)
    if len(values) != prod(shape):
        raise ValueError(f"{len(values)} values for the shape {shape}")
    return values.reshape(shape).copy()


def pixels(data: bytes) -> Any:
    width, height, num_chars = struct.unpack_from("<3I", data)
    end = 12 + num_chars
    return raw_image(data[12:end].decode(), (width, height), data[end:])


SCALARS = ("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64")
DECODERS: dict[str, Decode] = {
    "bytes": bytes,
    "str": text,
    "int": whole,
    **{name: partial(scalar, name) for name in (*SCALARS, "float16", "float32", "float64")},
    "str_int": int,
    "str_float": float,
    "str_decimal": lambda data: Decimal(data.decode()),
    "json": json.loads,
    "pil": pixels,
    "jpeg": decoded_image,
    "png": decoded_image,
    "ndarray": partial(array, None, None),
}


def decoder_of(encoding: str, allow_pickle: bool) -> Decode | None:
    """The decoder of an encoding such as `int` or `ndarray:float32:3,224,224`. None: there is none,
    or it is a pickle and these are not allowed."""
    name, _, options = encoding.partition(":")
    if encoding == PICKLE:
        return pickle.loads if allow_pickle else None
    if name == "ndarray" and options:
        dtype, _, dims = options.partition(":")
        sizes = dims.split(",") if dims else []
        if dtype not in VALUE_DTYPES.values() or not all(size.isdecimal() for size in sizes):
            return None
        return partial(array, dtype, tuple(map(int, sizes)) or None)
    return DECODERS.get(name if name == "jpeg" else encoding)
