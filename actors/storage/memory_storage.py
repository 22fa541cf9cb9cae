"""An object store in memory: for simulations, and the base of that of the tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from typing import Any, Self


class MemoryStorage:
    """Objects appear whole, and a listing shows all of them. Its clock is `now`."""

    def __init__(self, url: str = "memory://run", objects: dict[str, bytes] | None = None) -> None:
        self.url = url
        self.objects: dict[str, bytes] = {} if objects is None else objects
        self.times: dict[str, float] = {}
        self.now = 0.0

    def at(self, folder: str) -> Self:
        """A copy of a folder, for reading and for its URL."""
        inside = {
            n[len(folder) + 1 :]: d for n, d in self.objects.items() if n.startswith(f"{folder}/")
        }
        return type(self)(f"{self.url}/{folder}", inside)

    def size(self, name: str) -> int | None:
        return len(self.objects[name]) if name in self.objects else None

    def modified(self, name: str) -> float | None:
        return self.times.get(name)

    def read(self, name: str, offset: int = 0, max_bytes: int | None = None) -> bytes:
        if name not in self.objects:
            raise FileNotFoundError(name)
        return self.objects[name][offset:][:max_bytes]

    def write(self, name: str, data: bytes) -> None:
        self.objects[name] = bytes(data)
        self.times[name] = self.now

    @contextmanager
    def writing(self, name: str) -> Iterator[Any]:
        out = BytesIO()
        yield out
        self.write(name, out.getvalue())

    def files(self, folder: str = "") -> dict[str, int]:
        prefix = f"{folder}/" if folder else ""
        return {n: len(data) for n, data in list(self.objects.items()) if n.startswith(prefix)}

    def folders(self) -> list[str]:
        return sorted({name.partition("/")[0] for name in self.objects if "/" in name})

    def remove(self, name: str) -> None:
        for stored_name in list(self.objects):
            if stored_name == name or stored_name.startswith(f"{name}/"):
                self.objects.pop(stored_name, None)
                self.times.pop(stored_name, None)

    def in_arrow(self) -> Any:
        raise NotImplementedError
