"""Prepared data, wherever they lie: their index, and the shards that it names."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from actors.storage.credentials import without_credentials
from actors.storage.storage import Storage, is_remote, open_storage
from pipelines.data.fetching import FetchedShards, insist, unreachable
from pipelines.data.shards import FolderShards, Index, Shards, read_index
from pipelines.settings import CacheSettings
from pipelines.settings.errors import UserError


@dataclass(frozen=True)
class Prepared:
    """A folder of prepared data, open to be read."""

    place: str
    index: Index
    shards: Shards


def open_prepared(place: str | Path, cache: CacheSettings | None = None) -> Prepared:
    """The prepared data in a folder, or at a URL, from where they are fetched as `cache` says.

    Raises `UserError` if there are none, `DataUnreachable` if their store does not answer.
    """
    if isinstance(place, Path) or not is_remote(place):
        return Prepared(str(place), read_index(Path(place)), FolderShards(Path(place)))
    settings, there = cache or CacheSettings(), named_place(place)
    try:
        index = insist(partial(read_index, there), settings.reach_timeout_s)
    except OSError as error:
        raise unreachable(place, error) from None
    return Prepared(without_credentials(place), index, FetchedShards(there, settings))


def named_place(url: str) -> Storage:
    """The store that a URL names. Raises `UserError`."""
    try:
        return open_storage(url)
    except (ValueError, OSError) as error:
        raise UserError(
            f"--data {without_credentials(url)}: {error}; name a folder of this machine, or a URL "
            "such as s3://bucket/folder"
        ) from None
