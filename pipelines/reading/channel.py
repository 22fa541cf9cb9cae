"""Messages of any size between two processes of a machine; tensors travel in shared memory."""

from __future__ import annotations

import io
import mmap
import os
import pickle
import socket
import struct
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import cloudpickle
import torch
from torch import Tensor

MAX_INLINE_BYTES = 32 * 1024
"""A larger message goes into shared memory: a socket's buffer is limited."""
MAX_FDS = 4
ALIGNMENT = 64
INLINE, SHARED = b"\0", b"\1"


class Message(NamedTuple):
    value: Any
    fds: list[int]
    num_bytes: int
    """The bytes of shared memory that the value occupies."""


class Channel:
    """One end of a connection. A message arrives whole or not at all: `receive` raises `EOFError`
    if the process at the other end has died."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock

    @classmethod
    def pair(cls) -> tuple[Channel, Channel]:
        first, second = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return cls(first), cls(second)

    @classmethod
    def of(cls, fd: int) -> Channel:
        """The channel whose end is this file descriptor."""
        return cls(socket.socket(fileno=fd))

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, value: Any, fds: Sequence[int] = ()) -> None:
        """Send a value and file descriptors. Raises `OSError` if the other end is closed."""
        header = io.BytesIO()
        pickler = _Pickler(header)
        pickler.dump(value)
        segments = [header.getbuffer(), *pickler.tensors, *pickler.arrays]
        if len(segments) == 1 and len(segments[0]) <= MAX_INLINE_BYTES:
            socket.send_fds(self._socket, [INLINE, header.getbuffer()], list(fds))
            return
        memory = os.memfd_create("batch")
        try:
            _write(memory, segments, len(pickler.tensors))
            socket.send_fds(self._socket, [SHARED], [memory, *fds])
        finally:
            os.close(memory)

    def receive(self) -> Message:
        """The next message. Its tensors lie in the sender's shared memory."""
        data, fds, _, _ = socket.recv_fds(self._socket, MAX_INLINE_BYTES + 1, MAX_FDS)
        if not data:
            raise EOFError
        if data[:1] == INLINE:
            return Message(pickle.loads(data[1:]), fds, 0)
        memory, *others = fds
        try:
            shared = mmap.mmap(memory, 0)
        finally:
            os.close(memory)
        return Message(_read(memoryview(shared)), others, len(shared))

    def close(self) -> None:
        self._socket.close()


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Collects the bytes of plain tensors and of arrays instead of pickling them."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=5, buffer_callback=self._keep_array)
        self.tensors: list[memoryview] = []
        self.arrays: list[memoryview] = []

    def persistent_id(self, value: Any) -> tuple[int, torch.dtype, torch.Size] | None:
        if type(value) is not Tensor or value.layout != torch.strided or value.requires_grad:
            return None
        if value.device.type != "cpu":
            return None
        flat = value.resolve_conj().resolve_neg().contiguous().view(-1)
        self.tensors.append(flat.view(torch.uint8).numpy().data)
        return len(self.tensors) - 1, value.dtype, value.shape

    def _keep_array(self, buffer: pickle.PickleBuffer) -> bool:
        self.arrays.append(buffer.raw())
        return False


class _Unpickler(pickle.Unpickler):
    """Places tensors and arrays in the shared memory."""

    def __init__(self, header: memoryview, tensors: Sequence[memoryview], arrays: Any) -> None:
        super().__init__(io.BytesIO(header), buffers=arrays)
        self._tensors = tensors

    def persistent_load(self, key: tuple[int, torch.dtype, torch.Size]) -> Tensor:
        index, dtype, shape = key
        if not shape.numel():
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(self._tensors[index], dtype=dtype).view(shape)


def _write(memory: int, segments: Sequence[memoryview], num_tensors: int) -> None:
    """Write the number of segments, the number of tensors among them, the sizes, the segments."""
    sizes = [segment.nbytes for segment in segments]
    prefix = struct.pack(f"<{2 + len(sizes)}q", len(sizes), num_tensors, *sizes)
    places = list(_places(len(prefix), sizes))
    end = places[-1].stop
    os.ftruncate(memory, end)
    with mmap.mmap(memory, end) as shared:
        shared[: len(prefix)] = prefix
        for place, segment in zip(places, segments, strict=True):
            shared[place] = segment


def _read(shared: memoryview) -> Any:
    num_segments, num_tensors = struct.unpack_from("<2q", shared)
    sizes = struct.unpack_from(f"<{num_segments}q", shared, 16)
    places = _places(16 + 8 * num_segments, sizes)
    header, *others = (shared[place] for place in places)
    return _Unpickler(header, others[:num_tensors], others[num_tensors:]).load()


def _places(begin: int, sizes: Sequence[int]) -> Iterator[slice]:
    """Where segments of these sizes lie, one after another from `begin` on."""
    for size in sizes:
        begin += -begin % ALIGNMENT
        yield slice(begin, begin + size)
        begin += size
