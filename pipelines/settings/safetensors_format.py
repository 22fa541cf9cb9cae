"""The safetensors file format: a JSON header, then the bytes of each tensor.

Source: the description of the format in the documentation of safetensors.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping
from math import prod

import torch
from torch import Tensor

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
LENGTH = struct.Struct("<Q")
"""The header's size in bytes, which precedes the header."""
ALIGNMENT_BYTES = 8

Entry = tuple[str, torch.dtype, tuple[int, ...]]
"""A tensor's name, dtype and shape."""


def header_of(entries: Iterable[Entry], metadata: Mapping[str, str]) -> bytes:
    """The header of a file that holds the tensors in this order, without gaps."""
    fields: dict[str, object] = {"__metadata__": {"format": "pt", **metadata}}
    end = 0
    for name, dtype, shape in entries:
        begin, end = end, end + dtype.itemsize * prod(shape)
        fields[name] = {"dtype": DTYPES[dtype], "shape": shape, "data_offsets": [begin, end]}
    header = json.dumps(fields).encode()
    return header + b" " * (-len(header) % ALIGNMENT_BYTES)


def with_length(header: bytes) -> bytes:
    """The beginning of a file: the header's size and the header."""
    return LENGTH.pack(len(header)) + header


def bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a host tensor; a view if it is contiguous, else a copy."""
    flat = tensor.detach().contiguous().flatten()
    return flat.view(torch.uint8).numpy().data
