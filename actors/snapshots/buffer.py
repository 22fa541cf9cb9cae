"""The buffer of one worker's snapshots: two versions in shared memory, one of them always complete.

A version begins with its step, which is written last; while it is overwritten it has no step. So a
process that dies while writing leaves no half snapshot that looks complete.
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
"""Native alignment, so that the write is atomic."""
NOT_WHOLE = -1
NO_STEP = -2
"""The value of `kept_step` while no step is to be kept."""
NUM_VERSIONS = 2
PEER_TIMEOUT_S = 30.0
"""A snapshot server on another node that is silent for so long counts as having no copy."""


class Version:
    """The memory of one version: a head and `num_bytes`. Its descriptor is closed with it."""

    def __init__(self, fd: int, num_bytes: int) -> None:
        self.fd = fd
        self.num_bytes = num_bytes
        self._map = mmap.mmap(fd, HEAD_BYTES + num_bytes)
        weakref.finalize(self, os.close, fd)

    @property
    def step(self) -> int:
        """The step of the snapshot, or `NOT_WHOLE`."""
        step: int = _STEP.unpack_from(self._map)[0]
        return step

    @step.setter
    def step(self, step: int) -> None:
        _STEP.pack_into(self._map, 0, step)

    @property
    def memory(self) -> memoryview:
        """The snapshot's bytes, to be read and written in place."""
        return memoryview(self._map)[HEAD_BYTES:]


class SnapshotBuffer:
    """Both versions. The memory is freed when no process maps it any more."""

    def __init__(self, fds: list[int], num_bytes: int) -> None:
        self.versions = [Version(fd, num_bytes) for fd in fds]
        self.num_bytes = num_bytes
        self.write_lock = threading.Lock()
        """Held by a connection that writes from another node; the newest step wins."""
        self.claimed_step = NOT_WHOLE
        self.writer: socket.socket | None = None

    @classmethod
    def new(cls, num_bytes: int) -> SnapshotBuffer:
        """Allocate memory without a name: it is freed however its users end."""
        fds = [os.memfd_create("snapshot") for _ in range(NUM_VERSIONS)]
        for fd in fds:
            os.ftruncate(fd, HEAD_BYTES + num_bytes)
        buffer = cls(fds, num_bytes)
        for version in buffer.versions:
            version.step = NOT_WHOLE
        return buffer

    def version_to_overwrite(self, kept_step: int) -> Version:
        """The oldest version, but never that of `kept_step`."""
        candidates = [version for version in self.versions if version.step != kept_step]
        return min(candidates, key=lambda version: version.step)

    def version_of(self, step: int) -> Version | None:
        """The complete version of a step, if there is one."""
        return next((version for version in self.versions if version.step == step), None)

    def steps(self) -> list[int]:
        return sorted(v.step for v in self.versions if v.step != NOT_WHOLE)
