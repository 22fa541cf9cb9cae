"""Storage by URL: named files in a folder on a disk, or under a prefix of an object store."""

from __future__ import annotations

import errno
import os
import random
import re
import shutil
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol, TypeVar
from urllib.parse import parse_qsl, urlsplit

import pyarrow
from pyarrow import fs

from actors.storage.credentials import has_credentials
from actors.storage.errors import FileChanged
from elastic.protocol.policy import backoff_s

CONNECT_TIMEOUT_S, REQUEST_TIMEOUT_S = 5.0, 60.0
RETRY_S, LONGEST_RETRY_S = 0.5, 10.0
STREAM_TRIES = 6
"""How often a request of a stream to S3 is tried, for some 20 s: a large file takes thousands of
requests, and one that fails loses it. Others are tried three times, so that a failure is known
soon; ten tries of a refused connection would take 90 s."""
LASTING_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM)
"""A write that fails so fails again."""
T = TypeVar("T")
S3_OPTIONS = ("region", "endpoint_override")
"""The options in the query of an s3:// URL; credentials come from the environment."""


class Output(Protocol):
    """A file opened for writing its bytes in order."""

    def write(self, data: Any, /) -> object: ...


class Storage(Protocol):
    """Files by names relative to `url`. All methods raise `OSError` if storage fails."""

    url: str

    def at(self, folder: str) -> Storage:
        """The storage of a subfolder."""

    def size(self, name: str) -> int | None:
        """A file's size in bytes; None if it does not exist."""

    def modified(self, name: str) -> float | None:
        """When a file was written, by the storage's clock, in seconds since 1970.

        None if the file does not exist or the storage reports no times.
        """

    def read(self, name: str, offset: int = 0, max_bytes: int | None = None) -> bytes:
        """A file's bytes from `offset` on. Raises `FileNotFoundError`."""

    def write(self, name: str, data: bytes) -> None:
        """Create or replace a file: afterwards it is complete and durable, or unchanged."""

    def writing(self, name: str) -> Any:
        """A context that yields an `Output`; at its end the file is complete and durable.

        If it ends with an exception, the file does not exist.
        """

    def files(self, folder: str = "") -> dict[str, int]:
        """Names and sizes (bytes) of all files below a folder; empty if it does not exist."""

    def folders(self) -> list[str]:
        """The names of the subfolders, sorted."""

    def remove(self, name: str) -> None:
        """Remove a file, or a folder with its contents, if it exists."""

    def in_arrow(self) -> tuple[fs.FileSystem, str]:
        """The Arrow file system and path, for other libraries that read this storage."""


def open_storage(url: str) -> Storage:
    """The storage at a URL or path. Raises `ValueError` for an invalid URL."""
    if not is_remote(url):
        return DiskStorage(Path(url.removeprefix("file://")).resolve())
    parts = urlsplit(url)
    if "@" in parts.netloc or has_credentials(url):
        raise ValueError("credentials belong in the environment, not in the URL")
    if parts.scheme == "s3":
        options = dict(parse_qsl(parts.query))
        return ObjectStorage(url, _s3(options), _path(parts), _s3(options, STREAM_TRIES))
    try:
        system, path = fs.FileSystem.from_uri(url)
    except pyarrow.ArrowInvalid as error:
        raise ValueError(str(error)) from None
    return ObjectStorage(url, system, path)


def retry(
    operation: Callable[[], T],
    patience_s: float,
    min_tries: int = 1,
    lasting: Collection[int] = (),
) -> T:
    """Retry an operation on storage for up to `patience_s`, and up to `min_tries`; then raise its
    last `OSError`. Pauses are random, so that many workers do not try again together.

    `FileNotFoundError`, `FileChanged` and errors of the numbers `lasting` are raised at once.
    """
    began, num_failures = time.monotonic(), 0
    while True:
        try:
            return operation()
        except (FileNotFoundError, FileChanged):
            raise
        except OSError as error:
            num_failures += 1
            pause_s = backoff_s(RETRY_S, num_failures, LONGEST_RETRY_S)
            is_over = time.monotonic() + pause_s > began + patience_s
            if error.errno in lasting or (is_over and num_failures >= min_tries):
                raise
            time.sleep(random.uniform(0.5, 1.0) * pause_s)


def make_durable(path: Path) -> None:
    """Make a file's content, or a folder's entries, survive a crash of the machine."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def is_remote(url: str) -> bool:
    """Whether a URL names another place than a disk of this machine."""
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
            with suppress(OSError):  # the first exception says what happened
                draft.unlink()
            raise
        make_durable(target.parent)

    def files(self, folder: str = "") -> dict[str, int]:
        sizes = {}
        for root, _, names in os.walk(self.path / folder):
            for name in names:
                file = Path(root) / name
                with suppress(FileNotFoundError):  # removed meanwhile
                    sizes[str(file.relative_to(self.path))] = file.stat().st_size
        return sizes

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
    """A prefix of an object store, through Arrow's file systems: an object appears complete."""

    def __init__(
        self,
        url: str,
        system: fs.FileSystem,
        path: str,
        stream_system: fs.FileSystem | None = None,
    ) -> None:
        """`stream_system` reaches the same store for streams: see `STREAM_TRIES`."""
        self.url = url
        self._system = system
        self._path = path.rstrip("/")
        self._stream_system = stream_system or system

    def at(self, folder: str) -> ObjectStorage:
        parts = urlsplit(self.url)
        url = parts._replace(path=f"{parts.path.rstrip('/')}/{folder}").geturl()
        return ObjectStorage(url, self._system, f"{self._path}/{folder}", self._stream_system)

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
        content = pyarrow.py_buffer(data)  # raises for other types before anything is opened
        out = self._system.open_output_stream(f"{self._path}/{name}", compression=None)
        try:
            out.write(content)
        except BaseException:
            # The object is not removed: its old content may have been acknowledged.
            with suppress(Exception):  # the first exception says what happened
                out.close()
            raise
        out.close()

    @contextmanager
    def writing(self, name: str) -> Iterator[Output]:
        out = self._stream_system.open_output_stream(f"{self._path}/{name}", compression=None)
        try:
            yield out
        except BaseException:
            with suppress(OSError):
                out.close()
                self.remove(name)
            raise
        out.close()

    def files(self, folder: str = "") -> dict[str, int]:
        root = f"{self._path}/{folder}".rstrip("/")
        below = fs.FileSelector(root, allow_not_found=True, recursive=True)
        infos = self._system.get_file_info(below)
        start = len(self._path) + 1
        return {i.path[start:]: int(i.size) for i in infos if i.type == fs.FileType.File}

    def folders(self) -> list[str]:
        infos = self._system.get_file_info(fs.FileSelector(self._path, allow_not_found=True))
        return sorted(i.base_name for i in infos if i.type == fs.FileType.Directory)

    def remove(self, name: str) -> None:
        path = f"{self._path}/{name}"
        info = self._system.get_file_info(path)
        with suppress(FileNotFoundError):  # removed meanwhile
            if info.type == fs.FileType.File:
                self._system.delete_file(path)
            elif info.type == fs.FileType.Directory:
                self._system.delete_dir(path)  # in bulk: a thousand objects a request

    def in_arrow(self) -> tuple[fs.FileSystem, str]:
        return self._system, self._path


def _s3(options: dict[str, str], num_tries: int = 3) -> fs.S3FileSystem:
    unknown = sorted(options.keys() - set(S3_OPTIONS))
    if unknown:
        raise ValueError(
            f"unknown option {unknown[0]!r} in the URL's query; use {', '.join(S3_OPTIONS)}"
        )
    endpoint = options.get("endpoint_override", "")
    scheme, separator, host = endpoint.rpartition("://")
    return fs.S3FileSystem(
        region=options.get("region"),
        endpoint_override=host or None,
        scheme=scheme if separator else "https",
        connect_timeout=CONNECT_TIMEOUT_S,
        request_timeout=REQUEST_TIMEOUT_S,
        allow_delayed_open=True,  # one request for a small object
        retry_strategy=fs.AwsStandardS3RetryStrategy(max_attempts=num_tries),
    )


def _path(parts: Any) -> str:
    if not parts.netloc:
        raise ValueError("the URL names no bucket")
    return f"{parts.netloc}{parts.path}"
