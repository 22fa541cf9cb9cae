"""A failed rewrite of an object keeps the old object."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from pyarrow import fs

from actors.storage.storage import ObjectStorage


class Store:
    """The part of an Arrow file system that one object needs; a write raises `refusal` if set."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.refusal: Exception | None = None

    def open_output_stream(self, path: str, compression: str | None) -> Stream:
        return Stream(self, path)

    def get_file_info(self, path: str) -> Any:
        is_there = path in self.objects
        return SimpleNamespace(
            type=fs.FileType.File if is_there else fs.FileType.NotFound,
            size=len(self.objects.get(path, b"")),
        )

    def delete_file(self, path: str) -> None:
        del self.objects[path]


class Stream:
    """Publishes its content on close, if there was a write."""

    def __init__(self, store: Store, path: str) -> None:
        self._store, self._path = store, path
        self._content: bytes | None = None

    def write(self, data: Any) -> None:
        if self._store.refusal:
            raise self._store.refusal
        self._content = bytes(data)

    def close(self) -> None:
        if self._content is not None:
            self._store.objects[self._path] = self._content


@pytest.mark.parametrize("refusal", [OSError("slow down"), ValueError("broken answer")])
def test_failed_rewrite_keeps_the_old_object(refusal: Exception) -> None:
    store: Any = Store()
    storage = ObjectStorage("s3://bucket/run", store, "bucket/run")
    storage.write("log/1", b"acknowledged")
    store.refusal = refusal
    with pytest.raises(type(refusal), match=str(refusal)):
        storage.write("log/1", b"acknowledged and more")
    assert store.objects == {"bucket/run/log/1": b"acknowledged"}
    store.refusal = None
    storage.write("log/1", b"acknowledged and more")
    assert store.objects == {"bucket/run/log/1": b"acknowledged and more"}


def test_wrong_type_is_rejected_before_the_object_is_opened() -> None:
    store: Any = Store()
    storage = ObjectStorage("s3://bucket/run", store, "bucket/run")
    text: Any = "text"
    with pytest.raises(TypeError):
        storage.write("log/1", text)
    assert store.objects == {}
