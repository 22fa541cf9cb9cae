"""Resolution of `--data` to a folder of token shards, prepared if need be."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePosixPath
from urllib.parse import urlsplit

from actors.storage.credentials import without_credentials
from actors.storage.reachability import refuse_unreachable
from actors.storage.remote_files import MAGIC, is_read_by_fsspec, remote_files
from actors.storage.storage import is_remote, open_storage
from pipelines.data.corpus import READERS, Corpus, find_corpus
from pipelines.data.prepare import HELD_OUT_FRACTION, input_digest, prepare_at
from pipelines.data.prepared import named_place
from pipelines.data.shards import INDEX, is_prepared
from pipelines.data.tokens import Tokenizer, find_tokenizer
from pipelines.errors import UserError
from pipelines.settings.home import expand_home

RANDOM = "random"


@dataclass(frozen=True)
class DataPlan:
    """The meaning of `--data`: the place of the prepared data, and the text to prepare.

    `place` is None for random tokens. `corpus` and `tokenizer` are None if `--data` names prepared
    data.
    """

    place: str | None
    corpus: Corpus | None = None
    tokenizer: Tokenizer | None = None
    whole: str = INDEX
    """The file that is written last: if it exists, the data are prepared."""

    def is_there(self) -> bool:
        """Whether the data are prepared already, or need no preparation."""
        return (
            self.place is None
            or self.corpus is None
            or open_storage(self.place).size(self.whole) is not None
        )


def prepared_folder(
    data: str,
    cache: str,
    *,
    tokenizer: str = "bytes",
    separator: str | None = None,
    held_out_fraction: float = HELD_OUT_FRACTION,
) -> str | None:
    """The place of a run's prepared data, prepared now if need be; None for 'random'.

    See `find_data`. Raises `UserError`.
    """
    resolved = find_data(data, cache, tokenizer, separator, held_out_fraction)
    if (
        resolved.place is not None
        and resolved.corpus is not None
        and resolved.tokenizer is not None
    ):
        prepare_at(resolved.corpus, resolved.place, resolved.tokenizer, held_out_fraction)
    return resolved.place


def find_data(
    data: str,
    cache: str,
    tokenizer: str = "bytes",
    separator: str | None = None,
    held_out_fraction: float = HELD_OUT_FRACTION,
) -> DataPlan:
    """Resolve the data of a run, without preparing anything.

    `data` is 'random', a folder or URL of prepared data (which keep the tokenizer and fraction that
    they were prepared with), text as for `find_corpus`, also at a URL, or '' for the standard
    library. Text is prepared once, in a folder under `cache` (a path or URL) that the inputs
    determine. Raises `UserError`.
    """
    if data == RANDOM:
        return DataPlan(None)
    if is_remote(data):
        if not _names_text(data):
            named_place(data)
        try:
            refuse_unreachable(data)
        except OSError as error:
            shown = without_credentials(data)
            raise UserError(f"--data {shown}: cannot be reached ({error})") from None
        if not _is_text(data):
            return DataPlan(data)
    data = data.removeprefix("file://")
    if data and not is_remote(data) and is_prepared(folder := expand_home(data)):
        return DataPlan(str(folder))
    corpus = find_corpus(data)
    chosen = find_tokenizer(tokenizer, separator)
    digest = input_digest(corpus, chosen, held_out_fraction)
    return DataPlan(open_storage(cache).at(digest[:16]).url, corpus, chosen)


def _names_text(url: str) -> bool:
    """Whether a URL by its form names text files, not a folder of a store that may have prepared
    data."""
    path = urlsplit(url).path
    return (
        is_read_by_fsspec(url)
        or bool(set(path) & set(MAGIC))
        or PurePosixPath(path).suffix in READERS
    )


def _is_text(url: str) -> bool:
    """Whether a URL names text, and no prepared data. A folder without either counts as prepared
    data, whose reader says what is missing."""
    if _names_text(url):
        return True
    try:
        if open_storage(url).size(INDEX) is not None:
            return False
        return any(file.suffix in READERS for file in remote_files(url))
    except OSError:
        return False  # the reader of the index retries, and reports why it cannot
