"""Copies of folders of weights at URLs, on the disk of the machine: bounded, evicted by LRU."""

from __future__ import annotations

import fcntl
import os
import shutil
from functools import partial
from hashlib import sha256
from pathlib import Path

from actors.storage.credentials import without_credentials
from actors.storage.remote_files import RemoteFile, remote_files
from actors.storage.storage import is_remote, retry
from pipelines.data.cache.local_copies import cache_folder, write_file
from pipelines.data.cache.shard_cache import DRAFT, ShardCache, lock, mark_used
from pipelines.errors import DataUnreachable
from pipelines.settings import CacheSettings
from pipelines.settings.home import expand_home

_in_use: dict[Path, int] = {}
"""The folders that this process uses, each locked until it ends."""


def local_folder(place: str, settings: CacheSettings) -> Path:
    """The folder that a path names, or a whole copy of the files of one at a URL.

    The copy is made once on each machine, beside the cache, and belongs to the names, sizes and
    versions of the files. It is in use until this process ends. Copies that no process uses are
    removed, the least recently used first, if they exceed `cache.max_weights_bytes`. Raises
    `DataUnreachable` if the URL cannot be read or there is no room.
    """
    if not is_remote(place):
        return expand_home(place.removeprefix("file://"))
    root = cache_folder(settings)
    root = root.with_name(f"{root.name}-folders")
    try:
        found = retry(partial(remote_files, place), settings.reach_timeout_s)
        if not found:
            raise FileNotFoundError("there is no file")
        depth = min(file.path.count("/") for file in found)
        files = [file for file in found if file.path.count("/") == depth]
        identity = [(file.url, file.num_bytes, file.version) for file in files]
        folder = root / sha256(repr(identity).encode()).hexdigest()
        with ShardCache(root, settings.max_weights_bytes).locked():
            if not folder.is_dir():
                _make_room(root, sum(f.num_bytes for f in files), settings.max_weights_bytes)
                retry(partial(_copy, files, folder), settings.patience_s)
            _use(folder)
    except (OSError, ValueError, ImportError) as error:
        cause = without_credentials(str(error).splitlines()[0])
        raise DataUnreachable(
            f"{without_credentials(place)}: cannot be read ({cause}); check the URL, this "
            "machine's network and the credentials in its environment"
        ) from None
    return folder


def _use(folder: Path) -> None:
    mark_used(folder)
    if folder in _in_use and not os.fstat(_in_use[folder]).st_nlink:  # it has been removed
        os.close(_in_use.pop(folder))
    if folder not in _in_use:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(fd, fcntl.LOCK_SH)
        _in_use[folder] = fd


def _make_room(root: Path, num_bytes: int, max_bytes: int) -> None:
    """Remove unfinished copies, then unused ones by LRU, until so many bytes fit.

    The caller holds the lock of `root`. Raises `OSError` if they do not fit.
    """
    folders = [entry for entry in root.iterdir() if entry.is_dir()]
    ages = {entry: (entry.suffix != DRAFT, entry.stat().st_mtime_ns) for entry in folders}
    sizes = {entry: sum(file.stat().st_size for file in entry.iterdir()) for entry in folders}
    excess = sum(sizes.values()) + num_bytes - max_bytes
    for entry in sorted(folders, key=ages.__getitem__):
        if (excess > 0 or entry.suffix == DRAFT) and _remove_unused(entry):
            excess -= sizes[entry]
    if excess > 0:
        raise OSError(
            f"{root}: no room for {num_bytes} bytes of weights, as all copies there are in use or "
            "these are larger; raise cache.max_weights_bytes"
        )


def _remove_unused(folder: Path) -> bool:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        is_unused = lock(fd)
        if is_unused:
            shutil.rmtree(folder)
        return is_unused
    finally:
        os.close(fd)


def _copy(files: list[RemoteFile], folder: Path) -> None:
    draft = folder.with_name(folder.name + DRAFT)
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir()
    for file in files:
        with open(draft / file.name, "wb") as out:
            write_file(file, out)
            out.flush()
            os.fsync(out.fileno())
    os.replace(draft, folder)
