"""Positions of a dataset that can continue from its `state_dict`, in the folder of the run."""

from __future__ import annotations

import json
import re
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from zlib import crc32

import numpy as np
from torch import Tensor

from actors.storage.storage import Storage, open_storage

NUM_STEPS = 1000
"""After so many steps the position of a stream is noted."""
FILE = re.compile(r"\d+\.json")


@dataclass(frozen=True)
class StreamPosition:
    """The state of a dataset before it made the sample `index`, in its pass `epoch`."""

    index: int
    epoch: int
    state: Any
    digest: int
    """A checksum of the sample, by which a dataset shows that it continues there."""


class StreamPositions:
    """One small file for each `every`-th sample. All workers would write the same.

    A worker that joins, or a run that resumes, goes on from the newest that it needs, in place of
    the beginning of the data.
    """

    def __init__(self, url: str, every: int) -> None:
        self._url = url
        self.every = every
        self._writes: list[threading.Thread] = []

    def __getstate__(self) -> dict[str, Any]:
        """For another process."""
        return {**self.__dict__, "_writes": []}

    def note(self, position: StreamPosition) -> None:
        """Store a position, unless it is, on a thread: training does not wait for the storage."""
        self._writes = [thread for thread in self._writes if thread.is_alive()]
        if not self._writes:  # a storage that is out of reach gets no queue
            thread = threading.Thread(target=self._write, args=(position,), daemon=True)
            self._writes.append(thread)
            thread.start()

    def newest(self, index: int) -> StreamPosition | None:
        """The newest position up to a sample, if it can be read."""
        try:
            files = self._storage
            known = [int(name[:-5]) for name in files.files() if FILE.fullmatch(name)]
            if not (earlier := [number for number in known if number <= index]):
                return None
            return StreamPosition(**json.loads(files.read(_name(max(earlier)))))
        except (OSError, ValueError, TypeError) as error:
            _report(f"no position of the stream can be read: {error}: it begins again")
            return None

    def flush(self) -> None:
        """Wait for what is being written."""
        for thread in self._writes:
            thread.join()

    def _write(self, position: StreamPosition) -> None:
        try:
            files, name = self._storage, _name(position.index)
            if files.size(name) is None:
                files.write(name, json.dumps(vars(position)).encode())
        except (OSError, ValueError, TypeError) as error:
            _report(f"the position of the stream is not noted: {error}")

    @property
    def _storage(self) -> Storage:
        return open_storage(self._url)


def digest_of(sample: Any) -> int:
    """A checksum of a sample's tensors, arrays, numbers and texts."""
    match sample:
        case Tensor():
            return digest_of(sample.detach().cpu().contiguous().flatten().numpy())
        case np.ndarray():
            return crc32(str((sample.dtype, sample.shape)).encode(), crc32(sample.tobytes()))
        case Mapping():
            return digest_of([(key, digest_of(part)) for key, part in sample.items()])
        case list() | tuple():
            return crc32(repr([digest_of(part) for part in sample]).encode())
    return crc32(repr(sample).encode())


def _name(index: int) -> str:
    return f"{index:018d}.json"


def _report(text: str) -> None:
    print(f"elastic: {text}", file=sys.stderr, flush=True)
