"""An object store in memory that refuses writes and removals, for tests that try many
interleavings."""

from __future__ import annotations

import threading
from typing import Self

from actors.storage import memory_storage


class MemoryStorage(memory_storage.MemoryStorage):
    """Counts listings and removals, and refuses what a test says."""

    def __init__(self, url: str = "memory://run", objects: dict[str, bytes] | None = None) -> None:
        super().__init__(url, objects)
        self.num_listings = 0
        self.refusal: Exception | None = None
        """The exception that every write and removal raises, if any."""
        self.refusals: list[Exception] = []
        """What the next writes raise, each once."""
        self.gate: threading.Event | None = None
        """If any, removals wait until it is set."""
        self.num_removals = 0
        self.unremovable = ""
        """A folder whose files cannot be removed."""

    def at(self, folder: str) -> Self:
        inside = super().at(folder)
        inside.refusals = self.refusals
        return inside

    def write(self, name: str, data: bytes) -> None:
        if self.refusal:
            raise self.refusal
        if self.refusals:
            raise self.refusals.pop(0)
        super().write(name, data)

    def files(self, folder: str = "") -> dict[str, int]:
        self.num_listings += 1
        return super().files(folder)

    def remove(self, name: str) -> None:
        refusal = self.refusal
        self.num_removals += 1
        if self.gate:
            self.gate.wait()
        if refusal:
            raise refusal
        if self.unremovable and name.startswith(self.unremovable):
            raise PermissionError(13, "Permission denied", name)
        super().remove(name)
