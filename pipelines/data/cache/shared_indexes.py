"""Indexes of data in the folder of a run: a machine that joins later need not make them again."""

from __future__ import annotations

import sys
from hashlib import sha256

from actors.storage.storage import Storage, open_storage
from pipelines.data.cache.local_copies import LocalCopies

SUFFIX = ".npz"


class SharedIndexes:
    """The indexes that the datasets of this process use, by what determines them.

    They are read from the run's folder when a machine has none, and written there by `publish`,
    which only a worker of the run calls. A storage that fails is reported: a machine can always
    make an index itself.
    """

    def __init__(self) -> None:
        self._url: str | None = None
        self._used: dict[str, LocalCopies] = {}

    def use(self, url: str | None) -> None:
        """From now on, look for indexes in this folder; None: in none."""
        self._url = url

    def find(self, identity: str) -> bytes | None:
        """The index, if the folder has it."""
        if self._url is None:
            return None
        try:
            return self._storage().read(_name(identity))
        except FileNotFoundError:
            return None
        except OSError as error:
            _report(f"no index can be read from the run's folder: {error}")
            return None

    def note(self, identity: str, copies: LocalCopies) -> None:
        """Note an index that is in the cache of this machine."""
        self._used[identity] = copies

    def publish(self) -> None:
        """Write the noted indexes that the folder has not."""
        if self._url is None or not self._used:
            return
        try:
            storage = self._storage()
            present = storage.files()
            for identity, copies in self._used.items():
                if _name(identity) not in present and (content := copies.find(identity)):
                    storage.write(_name(identity), content)
        except OSError as error:
            _report(f"the indexes of the data cannot be written to the run's folder: {error}")
        self._used.clear()

    def _storage(self) -> Storage:
        assert self._url is not None
        return open_storage(self._url)


INDEXES = SharedIndexes()
"""Those of this process."""


def _name(identity: str) -> str:
    return sha256(identity.encode()).hexdigest() + SUFFIX


def _report(line: str) -> None:
    print(f"elastic: {line}", file=sys.stderr, flush=True)
