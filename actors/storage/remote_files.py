"""Files at a URL that are only read: one, those of a folder, or those that a pattern names."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from urllib.parse import SplitResult, urlsplit

from fsspec import available_protocols
from fsspec.core import url_to_fs
from pyarrow import fs

from actors.storage.content_versions import Version, report_unversioned, size_and_version
from actors.storage.credentials import has_credentials, without_credentials
from actors.storage.errors import FileChanged
from actors.storage.storage import open_storage

ARROW_SCHEMES = ("s3", "gs", "gcs", "abfs", "abfss", "hdfs", "viewfs")
"""Others, such as https, are read by fsspec, if it has what it needs for them."""
MAGIC = "*["
READ_BYTES = 1 << 23


@dataclass(frozen=True)
class RemoteFile:
    """A file at a URL, as it was when it was listed."""

    url: str
    num_bytes: int
    version: Version
    """Its checksum, or the time of its last change."""
    path: str = field(repr=False)
    system: fs.FileSystem = field(repr=False, compare=False)

    def __str__(self) -> str:
        return without_credentials(self.url)

    @property
    def name(self) -> str:
        return PurePosixPath(self.path).name

    @property
    def suffix(self) -> str:
        return PurePosixPath(self.path).suffix

    def chunks(self) -> Iterator[bytes]:
        """The content in order. Raises `OSError`, `FileChanged` if it is another than listed."""
        num_read = 0
        with self.system.open_input_stream(self.path, compression=None) as file:
            while data := bytes(file.read(READ_BYTES)):
                num_read += len(data)
                yield data
        now, version = size_and_version(self.system, self.system.get_file_info(self.path))
        if now != self.num_bytes:
            raise FileChanged(f"has {now} bytes now, but was listed with {self.num_bytes}")
        if version != self.version:
            raise FileChanged(f"has changed since it was listed ({self.version}, now {version})")
        if num_read != self.num_bytes:
            raise OSError(f"only {num_read} of {self.num_bytes} bytes arrived")

    def read_bytes(self) -> bytes:
        return b"".join(self.chunks())

    @contextmanager
    def local(self) -> Iterator[Path]:
        """A copy on this machine's disk, which is removed at the end."""
        with tempfile.NamedTemporaryFile(prefix="elastic-", suffix=self.suffix) as copy:
            for data in self.chunks():
                copy.write(data)
            copy.flush()
            yield Path(copy.name)


def remote_files(url: str) -> list[RemoteFile]:
    """The file at a URL; or those below a folder, except in hidden ones; or those of a pattern.

    In a pattern `*` stands for a part of a name, `**/` for any folders and `[...]` for one of some
    characters; none matches a hidden file. They are sorted by path. Raises `OSError` if they cannot
    be listed, and `ValueError` or `ImportError` for a URL that cannot be read here.
    """
    parts = urlsplit(url)
    folder, pattern = _folder_and_pattern(parts.path)
    root = parts._replace(path=folder)
    system, path = _opened(root)
    path = path.rstrip("/")
    info = system.get_file_info(path)
    if info.type == fs.FileType.File and not pattern:
        return [_remote_file(root, info, system)]
    below = fs.FileSelector(path, allow_not_found=True, recursive=True)
    files = []
    for found in system.get_file_info(below):
        name = found.path[len(path) + 1 :]
        is_chosen = _matches(name, pattern) if pattern else not _is_in_hidden_folder(name)
        if found.type == fs.FileType.File and is_chosen:
            place = root._replace(path=f"{folder.rstrip('/')}/{name}")
            files.append(_remote_file(place, found, system))
    return sorted(files, key=lambda file: file.path)


def is_read_by_fsspec(url: str) -> bool:
    """Whether a URL's scheme is one that only fsspec knows, so that nothing can be stored there."""
    scheme = urlsplit(url).scheme
    return scheme not in ARROW_SCHEMES and scheme in available_protocols()


def _opened(parts: SplitResult) -> tuple[fs.FileSystem, str]:
    url = parts.geturl()
    if parts.scheme in ARROW_SCHEMES:
        return open_storage(url).in_arrow()
    if "@" in parts.netloc or has_credentials(url):
        raise ValueError("credentials belong in the environment, not in the URL")
    system, path = url_to_fs(url)
    return fs.PyFileSystem(fs.FSSpecHandler(system)), path


def _remote_file(place: SplitResult, info: fs.FileInfo, system: fs.FileSystem) -> RemoteFile:
    num_bytes, version = size_and_version(system, info)
    if num_bytes is None:
        raise OSError(f"{place.path}: the store does not say its size")
    if version is None:
        report_unversioned(f"{place.scheme}://{place.netloc}")
    return RemoteFile(place.geturl(), int(num_bytes), version, info.path, system)


def _folder_and_pattern(path: str) -> tuple[str, str]:
    names = path.split("/")
    first = next((i for i, name in enumerate(names) if set(name) & set(MAGIC)), None)
    if first is None:
        return path, ""
    return "/".join(names[:first]), "/".join(names[first:])


def _matches(name: str, pattern: str) -> bool:
    tokens = {r"\*\*/": "(?:.*/)?", r"\*": "[^/]*", r"\[": "[", r"\]": "]", r"\-": "-"}
    found = re.compile("|".join(map(re.escape, tokens)))
    escaped = found.sub(lambda match: tokens[match[0]], re.escape(pattern))
    is_hidden = any(part.startswith(".") for part in name.split("/"))
    return not is_hidden and re.fullmatch(escaped, name) is not None


def _is_in_hidden_folder(name: str) -> bool:
    return any(part.startswith(".") for part in name.split("/")[:-1])
