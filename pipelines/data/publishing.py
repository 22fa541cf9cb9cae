"""Prepared data brought to an object store: the shards first, the index last."""

from __future__ import annotations

import tempfile
from pathlib import Path

from actors.credentials import without_credentials
from actors.storage import Storage, is_remote
from pipelines.data.corpus import Corpus
from pipelines.data.index import INDEX, Index, read_index, write_index
from pipelines.data.prepare import HELD_OUT_FRACTION, input_digest, prepare, refuse_other
from pipelines.data.prepared import named_place
from pipelines.data.tokens import Tokenizer
from pipelines.errors import UserError

FETCHED_SHARD_ROWS = 1 << 23
"""Of a file that is to be fetched: a sample costs a whole one, where it is not in the cache."""
READ_BYTES = 1 << 23
SUFFIX = ".arrow"
"""What is left of a try that was broken off; the next one replaces it."""


def prepare_at(
    corpus: Corpus, place: str, tokenizer: Tokenizer, held_out_fraction: float = HELD_OUT_FRACTION
) -> Index:
    """As `prepare`, to a folder or a URL. For a URL all shards pass through a temporary folder of
    this machine. Raises `UserError`."""
    if not is_remote(place):
        return prepare(corpus, Path(place.removeprefix("file://")), tokenizer, held_out_fraction)
    there = named_place(place)
    try:
        if there.size(INDEX) is not None:
            index = read_index(there)
            wanted = input_digest(corpus, tokenizer, held_out_fraction)
            refuse_other(without_credentials(place), index, wanted)
            return index
        others = sorted(name for name in there.files() if not name.endswith(SUFFIX))
        if others:
            raise UserError(
                f"{without_credentials(place)}: holds other files, as {others[0]}; name a new or "
                "empty folder"
            )
        with tempfile.TemporaryDirectory(prefix="elastic-prepare-") as folder:
            here = Path(folder) / "out"
            index = prepare(corpus, here, tokenizer, held_out_fraction, FETCHED_SHARD_ROWS)
            return _publish(here, index, there)
    except OSError as error:
        cause = without_credentials(str(error).splitlines()[0])
        raise UserError(
            f"{without_credentials(place)}: cannot write prepared data there ({cause})"
        ) from None


def _publish(here: Path, index: Index, there: Storage) -> Index:
    for split in index.splits.values():
        for shard in (*split.tokens, *split.starts):
            with (here / shard.name).open("rb") as file, there.writing(shard.name) as out:
                while data := file.read(READ_BYTES):
                    out.write(data)
    write_index(there, index)
    return index
