"""Storage by URL: a folder on a disk, or a prefix of an object store, as files with names."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import parse_qsl, urlsplit

import pyarrow
from pyarrow import fs

from actors.storage.credentials import has_credentials

CONNECT_TIMEOUT_S, REQUEST_TIMEOUT_S = 5.0, 60.0
S3_OPTIONS = ("region", "endpoint_override")
"""What the query of an s3:// URL may say; credentials come from the environment."""


class Output(Protocol):
    """Takes a file's bytes, one after the other."""

    def write(self, data: Any, /) -> object: ...


class Storage(Protocol):
    """Files by names relative to `url`. All methods raise `OSError` if the storage refuses."""

    url: str

    def at(self, folder: str) -> Storage:
        """The storage of a folder in this one."""

    def size(self, name: str) -> int | None:
        """In bytes; None if there is no such file."""

    def modified(self, name: str) -> float | None:
        """When a file was written by the storage's clock, in seconds since the epoch, if it tells;
        None if there is no such file."""

    def read(self, name: str, offset: int = 0, max_bytes: int | None = None) -> bytes:
        """A file from `offset` on. Raises `FileNotFoundError`."""

    def write(self, name: str, data: bytes) -> None:
        """Make or replace a file: it is whole and durable, or as it was before."""

    def writing(self, name: str) -> Any:
        """A context that gives an `Output`; at its end the file is whole and durable.

        If it ends by an exception there is no such file.
        """

    def files(self, folder: str = "") -> dict[str, int]:
        """Names and sizes (bytes) of all files below a folder; none if it is not there."""

    def folders(self) -> list[str]:
        """The names of the folders in it, sorted."""

    def remove(self, name: str) -> None:
        """A file, or a folder with all in it; nothing if it is not there."""

    def in_arrow(self) -> tuple[fs.FileSystem, str]:
        """The file system that other libraries read it through, and the path there."""


def open_storage(url: str) -> Storage:
    """The storage at a URL or path. Raises `ValueError` for a URL that names none."""
    if not is_remote(url):
        return DiskStorage(Path(url.removeprefix("file://")).resolve())
    parts = urlsplit(url)
    if "@" in parts.netloc or has_credentials(url):
        raise ValueError("credentials belong in the environment, not in the URL")
    if parts.scheme == "s3":
        return ObjectStorage(url, _s3(dict(parse_qsl(parts.query))), _path(parts))
    try:
        system, path = fs.FileSystem.from_uri(url)
    except pyarrow.ArrowInvalid as error:
        raise ValueError(str(error)) from None
    return ObjectStorage(url, system, path)


def make_durable(path: Path) -> None:
    """Have what a file holds, or which entries a folder has, outlive the machine's end."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def is_remote(url: str) -> bool:
    """Whether it lies elsewhere than on a disk of this machine."""
    return bool(re.match(r"[a-z][a-z0-9+.-]*://", url)) and not url.startswith("file://")


class DiskStorage:
    """A folder of the file system."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.url = str(path)

    def at(self, folder: str) -> DiskStorage:
        return DiskStorage(self.path / folder)

    def size(self, name: str) -> int | None:
        try:
            return (self.path / name).stat().st_size
        except (FileNotFoundError, NotADirectoryError):
            return None

    def modified(self, name: str) -> float | None:
        file = self.path / name
        return file.stat().st_mtime if file.exists() else None

    def read(self, name: str, offset: int = 0, max_bytes: int | None = None) -> bytes:
        with open(self.path / name, "rb") as file:
            file.seek(offset)
            return file.read(-1 if max_bytes is None else max_bytes)

    def write(self, name: str, data: bytes) -> None:
        with self.writing(name) as out:
            out.write(data)

    @contextmanager
    def writing(self, name: str) -> Iterator[Output]:
        target = self.path / name
        draft = target.with_name(f".{target.name}.{os.getpid()}.partial")
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(draft, "wb") as out:
                yield out
                out.flush()
                os.fsync(out.fileno())
            os.replace(draft, target)
        except BaseException:
            with suppress(OSError):  # what has happened is told by the exception
                draft.unlink()
            raise
        make_durable(target.parent)

    def files(self, folder: str = "") -> dict[str, int]:
        found = {}
        for root, _, names in os.walk(self.path / folder):
            for name in names:
                file = Path(root) / name
                with suppress(FileNotFoundError):  # removed meanwhile
                    found[str(file.relative_to(self.path))] = file.stat().st_size
        return found

    def folders(self) -> list[str]:
        if not self.path.is_dir():
            return []
        return sorted(entry.name for entry in self.path.iterdir() if entry.is_dir())

    def remove(self, name: str) -> None:
        target = self.path / name
        if target.is_dir():
            shutil.rmtree(target)
        else:
            target.unlink(missing_ok=True)

    def in_arrow(self) -> tuple[fs.FileSystem, str]:
        return fs.LocalFileSystem(), str(self.path)


class ObjectStorage:
    """A prefix of an object store, through Arrow's file systems: an object appears whole."""

    def __init__(self, url: str, system: fs.FileSystem, path: str) -> None:
        self.url = url
        self._system = system
        self._path = path.rstrip("/")

    def at(self, folder: str) -> ObjectStorage:
        parts = urlsplit(self.url)
        url = parts._replace(path=f"{parts.path.rstrip('/')}/{folder}").geturl()
        return ObjectStorage(url, self._system, f"{self._path}/{folder}")

    def size(self, name: str) -> int | None:
        info = self._system.get_file_info(f"{self._path}/{name}")
        return int(info.size) if info.type == fs.FileType.File else None

    def modified(self, name: str) -> float | None:
        info = self._system.get_file_info(f"{self._path}/{name}")
        return None if info.mtime_ns is None else float(info.mtime_ns) / 1e9

    def read(self, name: str, offset: int = 0, max_bytes: int | None = None) -> bytes:
        with self._system.open_input_file(f"{self._path}/{name}") as file:
            left = max(0, file.size() - offset)
            wanted = left if max_bytes is None else min(left, max_bytes)
            return bytes(file.read_at(wanted, offset)) if wanted else b""

    def write(self, name: str, data: bytes) -> None:
        content = pyarrow.py_buffer(data)  # what is no bytes is refused before anything is opened
        out = self._system.open_output_stream(f"{self._path}/{name}", compression=None)
        try:
            out.write(content)
        except BaseException:
            # The object is not removed: what was there before may have been acknowledged.
            with suppress(Exception):  # the first exception says what has happened
                out.close()
            raise
        out.close()

    @contextmanager
    def writing(self, name: str) -> Iterator[Output]:
        out = self._system.open_output_stream(f"{self._path}/{name}", compression=None)
        try:
            yield out
        except BaseException:
            with suppress(OSError):
                out.close()
                self.remove(name)
            raise
        out.close()

    def files(self, folder: str = "") -> dict[str, int]:
        place = f"{self._path}/{folder}".rstrip("/")
        below = fs.FileSelector(place, allow_not_found=True, recursive=True)
        infos = self._system.get_file_info(below)
        start = len(self._path) + 1
        return {i.path[start:]: int(i.size) for i in infos if i.type == fs.FileType.File}

    def folders(self) -> list[str]:
        infos = self._system.get_file_info(fs.FileSelector(self._path, allow_not_found=True))
        return sorted(i.base_name for i in infos if i.type == fs.FileType.Directory)

    def remove(self, name: str) -> None:
        place = f"{self._path}/{name}"
        if self.size(name) is not None:
            self._system.delete_file(place)
            return
        for file in self.files(name):
            self._system.delete_file(f"{self._path}/{file}")

    def in_arrow(self) -> tuple[fs.FileSystem, str]:
        return self._system, self._path


def _s3(options: dict[str, str]) -> fs.S3FileSystem:
    unknown = sorted(options.keys() - set(S3_OPTIONS))
    if unknown:
        raise ValueError(f"unknown {unknown[0]!r} in the query; known: {', '.join(S3_OPTIONS)}")
    endpoint = options.get("endpoint_override", "")
    scheme, separator, host = endpoint.rpartition("://")
    return fs.S3FileSystem(
        region=options.get("region"),
        endpoint_override=host or None,
        scheme=scheme if separator else "https",
        connect_timeout=CONNECT_TIMEOUT_S,
        request_timeout=REQUEST_TIMEOUT_S,
        allow_delayed_open=True,  # one request for what is small
    )


def _path(parts: Any) -> str:
    if not parts.netloc:
        raise ValueError("it names no bucket")
    return f"{parts.netloc}{parts.path}"
