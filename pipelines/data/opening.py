"""From what `--data` says to a folder of token shards."""

from __future__ import annotations

from pathlib import Path

from actors.storage import is_remote
from pipelines.data.corpus import find_corpus
from pipelines.data.index import is_prepared
from pipelines.data.prepare import HELD_OUT_FRACTION, input_digest, prepare
from pipelines.data.prepared import named_place
from pipelines.data.tokens import find_tokenizer

RANDOM = "random"


def prepared_folder(
    data: str,
    cache: Path,
    *,
    tokenizer: str = "bytes",
    separator: str | None = None,
    held_out_fraction: float = HELD_OUT_FRACTION,
) -> Path | str | None:
    """Where the data of a run lie prepared, having prepared them if need be; None for 'random'.

    `data` is 'random', a folder of prepared data or its URL (which keep the tokenizer and fraction
    that they were prepared with), text as for `find_corpus`, or '' for the standard library. Text
    is prepared in a folder of its own under `cache`, once. Raises `UserError`.
    """
    if data == RANDOM:
        return None
    if is_remote(data):
        named_place(data)
        return data
    data = data.removeprefix("file://")
    if data and is_prepared(folder := Path(data).expanduser()):
        return folder
    corpus = find_corpus(data)
    chosen = find_tokenizer(tokenizer, separator)
    folder = cache / input_digest(corpus, chosen, held_out_fraction)[:16]
    prepare(corpus, folder, chosen, held_out_fraction)
    return folder
