"""What a store reports of a file that changes with its content: a checksum, or else a time."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from pyarrow import fs

CHECKSUMS = (
    *("ETag", "etag", "e_tag", "Content-MD5", "content_md5", "Digest", "md5", "md5Hash"),
    *("crc32c", "sha256", "checksum", "version_id", "generation"),
)
"""The names that fsspec's file systems give to checksums and versions."""
TIMES = (
    *("Last-Modified", "LastModified", "last_modified"),
    *("mtime", "updated", "modified", "created"),
)

Version = int | str | None
"""None: the store reports nothing that would change."""
_reported: set[str] = set()


def version_in(info: Mapping[str, Any]) -> Version:
    """The version of a file of which an fsspec file system gives this information.

    `ukey` would not do: that of https is the same for any content.
    """
    for names in (CHECKSUMS, TIMES):
        if known := [f"{name} {info[name]}" for name in names if info.get(name)]:
            return ", ".join(known)
    return None


def size_and_version(system: fs.FileSystem, info: fs.FileInfo) -> tuple[int | None, Version]:
    """A file's size, None if the store does not say it, and its version."""
    if isinstance(system, fs.PyFileSystem) and isinstance(system.handler, fs.FSSpecHandler):
        details = system.handler.fs.info(info.path)
        return details.get("size"), version_in(details)
    return info.size, info.mtime_ns


def report_unversioned(place: str) -> None:
    """Say once that changed files of a store are not noticed if they keep their size."""
    if place not in _reported:
        _reported.add(place)
        print(
            f"elastic: {place}: the store reports neither a checksum nor a time of its files: one "
            "that changes but keeps its size is not noticed; give changed files other names",
            file=sys.stderr,
            flush=True,
        )
