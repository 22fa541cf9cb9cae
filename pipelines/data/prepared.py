"""Prepared data, in a folder or at a URL: the index and the shards that it lists."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from actors.storage.credentials import without_credentials
from actors.storage.storage import Storage, is_remote, open_storage, retry
from pipelines.data.fetching import FetchedShards, unreachable
from pipelines.data.shards import FolderShards, Index, Shards, read_index
from pipelines.errors import UserError
from pipelines.settings import CacheSettings


@dataclass(frozen=True)
class Prepared:
    """Opened prepared data."""

    place: str
    index: Index
    shards: Shards


def open_prepared(place: str | Path, cache: CacheSettings | None = None) -> Prepared:
    """Open the prepared data in a folder or at a URL; data at a URL are fetched through `cache`.

    Raises `UserError` if there are none, `DataUnreachable` if their store does not answer.
    """
    if isinstance(place, Path) or not is_remote(place):
        return Prepared(str(place), read_index(Path(place)), FolderShards(Path(place)))
    settings, storage = cache or CacheSettings(), named_place(place)
    try:
        index = retry(partial(read_index, storage), settings.reach_timeout_s)
    except OSError as error:
        raise unreachable(place, error) from None
    return Prepared(without_credentials(place), index, FetchedShards(storage, settings))


def named_place(url: str) -> Storage:
    """The storage that a URL names. Raises `UserError`."""
    try:
        return open_storage(url)
    except (ValueError, OSError) as error:
        raise UserError(
            f"--data {without_credentials(url)}: {error}; name a folder of this machine, or a URL "
            "such as s3://bucket/folder"
        ) from None
