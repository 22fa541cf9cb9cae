"""From what `--data` says to a folder of token shards."""

from __future__ import annotations

from pathlib import Path

from actors.storage import is_remote, open_storage
from pipelines.data.corpus import find_corpus
from pipelines.data.index import is_prepared
from pipelines.data.prepare import HELD_OUT_FRACTION, input_digest
from pipelines.data.prepared import named_place
from pipelines.data.publishing import prepare_at
from pipelines.data.tokens import find_tokenizer

RANDOM = "random"


def prepared_folder(
    data: str,
    cache: str,
    *,
    tokenizer: str = "bytes",
    separator: str | None = None,
    held_out_fraction: float = HELD_OUT_FRACTION,
) -> str | None:
    """Where the data of a run lie prepared, having prepared them if need be; None for 'random'.

    `data` is 'random', a folder of prepared data or its URL (which keep the tokenizer and fraction
    that they were prepared with), text as for `find_corpus`, or '' for the standard library. Text
    is prepared in a folder of its own under `cache`, a path or URL, once. Raises `UserError`.
    """
    if data == RANDOM:
        return None
    if is_remote(data):
        named_place(data)
        return data
    data = data.removeprefix("file://")
    if data and is_prepared(folder := Path(data).expanduser()):
        return str(folder)
    corpus = find_corpus(data)
    chosen = find_tokenizer(tokenizer, separator)
    digest = input_digest(corpus, chosen, held_out_fraction)
    place = open_storage(cache).at(digest[:16]).url
    prepare_at(corpus, place, chosen, held_out_fraction)
    return place
