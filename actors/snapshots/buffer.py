"""Room for one worker's snapshots: two versions in shared memory, one of them always whole.

A version begins with the step that it is of, written last; while it is written over it is of none.
So whoever dies amid writing leaves no half snapshot that looks whole.
"""

from __future__ import annotations

import mmap
import os
import socket
import struct
import threading
import weakref

HEAD_BYTES = 64
_STEP = struct.Struct("@q")
"""Native, so that it is written at once."""
NOT_WHOLE = -1
NOTHING = -2
"""No step at all, where one might be kept."""
NUM_VERSIONS = 2
PEER_TIMEOUT_S = 30.0
"""A keeper elsewhere that is silent for so long has no copy."""


class Version:
    """One version's memory, of `num_bytes` behind its head; the descriptor is closed with it."""

    def __init__(self, fd: int, num_bytes: int) -> None:
        self.fd = fd
        self.num_bytes = num_bytes
        self._map = mmap.mmap(fd, HEAD_BYTES + num_bytes)
        weakref.finalize(self, os.close, fd)

    @property
    def step(self) -> int:
        """Of which step it is, or `NOT_WHOLE`."""
        step: int = _STEP.unpack_from(self._map)[0]
        return step

    @step.setter
    def step(self, step: int) -> None:
        _STEP.pack_into(self._map, 0, step)

    @property
    def memory(self) -> memoryview:
        """What it holds, to be read and written in place."""
        return memoryview(self._map)[HEAD_BYTES:]


class SnapshotBuffer:
    """Both versions. The memory is freed when the last process has let go of it."""

    def __init__(self, fds: list[int], num_bytes: int) -> None:
        self.versions = [Version(fd, num_bytes) for fd in fds]
        self.num_bytes = num_bytes
        self.turn = threading.Lock()
        """Of those who write from elsewhere; the one with the newest step counts."""
        self.claimed_step = NOT_WHOLE
        self.writer: socket.socket | None = None

    @classmethod
    def new(cls, num_bytes: int) -> SnapshotBuffer:
        """Memory without a name: nothing is left of it, however its users end."""
        fds = [os.memfd_create("snapshot") for _ in range(NUM_VERSIONS)]
        for fd in fds:
            os.ftruncate(fd, HEAD_BYTES + num_bytes)
        room = cls(fds, num_bytes)
        for version in room.versions:
            version.step = NOT_WHOLE
        return room

    def spare(self, kept_step: int) -> Version:
        """The one to be written over next, never that of a step which is to be kept."""
        able = [version for version in self.versions if version.step != kept_step]
        return min(able, key=lambda version: version.step)

    def of(self, step: int) -> Version | None:
        """The whole version of a step, if there is one."""
        return next((version for version in self.versions if version.step == step), None)

    def steps(self) -> list[int]:
        return sorted(v.step for v in self.versions if v.step != NOT_WHOLE)
