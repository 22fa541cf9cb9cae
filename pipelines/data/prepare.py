"""Prepare: text becomes memory-mapped Arrow token shards, streaming, once."""

from __future__ import annotations

import fcntl
import json
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Literal

import numpy as np

from actors.storage.credentials import without_credentials
from actors.storage.storage import DiskStorage, Storage, is_remote
from pipelines.data.columns import NUM_SHARD_ROWS, ColumnWriter
from pipelines.data.corpus import Corpus
from pipelines.data.prepared import named_place
from pipelines.data.shards import (
    FORMAT,
    INDEX,
    LOCK,
    SPLITS,
    DataSplit,
    Index,
    is_prepared,
    read_index,
    write_index,
)
from pipelines.data.tokens import Tokenizer
from pipelines.settings.errors import UserError

HELD_OUT_FRACTION = 0.02

NUM_CHARS_AT_ONCE = 1 << 20
"""Documents are tokenised together up to this length."""


def prepare(
    corpus: Corpus,
    out: Path,
    tokenizer: Tokenizer,
    held_out_fraction: float = HELD_OUT_FRACTION,
    num_shard_rows: int = NUM_SHARD_ROWS,
) -> Index:
    """Turn a corpus into token shards in the folder `out`, or find them finished there.

    A document starts with the separator. It goes to the held-out split if the SHA-256 of its text
    is below that fraction of all values, so equal documents share a split and the order of files
    plays no part; if none is, the one of least hash goes there. Memory is bounded by about 1 M
    tokens a split and the longest document. The index is written last: what was left half done
    is invisible, and is begun again; a second process waits for the first.

    Raises `UserError` if the corpus is empty or cannot be read, if `out` cannot be written, or
    if it holds anything else.
    """
    if not 0 <= held_out_fraction < 1:
        raise UserError(f"held-out fraction {held_out_fraction}: give a part of 1, such as 0.02")
    wanted = input_digest(corpus, tokenizer, held_out_fraction)
    with writable(out):
        if (out / INDEX).is_file():
            return finished(out, wanted)
        claim(out)
        with locked(out):
            if (out / INDEX).is_file():
                return finished(out, wanted)
            splits = write_splits(corpus, out, tokenizer, held_out_fraction, num_shard_rows)
            index = Index(
                format=FORMAT,
                source=corpus.name,
                input=wanted,
                tokenizer=tokenizer.name,
                vocab_size=tokenizer.vocab_size,
                separator=tokenizer.separator,
                dtype=dtype_of(tokenizer),
                held_out_fraction=held_out_fraction,
                splits=splits,
            )
            write_index(DiskStorage(out), index)
    return index


def input_digest(corpus: Corpus, tokenizer: Tokenizer, held_out_fraction: float) -> str:
    """Identifies what `prepare` is asked for, without reading the corpus."""
    asked = [FORMAT, corpus.fingerprint(), tokenizer.name, held_out_fraction]
    return sha256(json.dumps(asked).encode()).hexdigest()


def dtype_of(tokenizer: Tokenizer) -> Literal["uint16", "uint32"]:
    return "uint16" if tokenizer.vocab_size <= 1 << 16 else "uint32"


@contextmanager
def writable(out: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{out}: cannot write prepared data here ({error.strerror}); name another folder"
        ) from error


def claim(out: Path) -> None:
    """Make the folder ours; it must be new, empty or left half done."""
    out.mkdir(parents=True, exist_ok=True)
    others = [file for file in out.iterdir() if file.name != LOCK]
    if others and not is_prepared(out):  # in this order: others appear only after the lock
        raise UserError(f"{out}: holds other files; name a new or empty folder")
    (out / LOCK).touch()


@contextmanager
def locked(out: Path) -> Iterator[None]:
    """Hold the folder alone; the kernel lets go of it when the process ends, however it ends."""
    with (out / LOCK).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def finished(out: Path, wanted: str) -> Index:
    index = read_index(out)
    refuse_other(str(out), index, wanted)
    return index


def refuse_other(place: str, index: Index, wanted: str) -> None:
    if index.input != wanted:
        raise UserError(
            f"{place}: was prepared from other text or settings ({index.source}); "
            "name another folder or delete it"
        )


def write_splits(
    corpus: Corpus, out: Path, tokenizer: Tokenizer, held_out_fraction: float, num_shard_rows: int
) -> dict[str, DataSplit]:
    below = int(held_out_fraction * 2**64)
    splits, least = write_once(corpus, out, tokenizer, below, num_shard_rows)
    num_documents = sum(split.num_documents for split in splits.values())
    if num_documents == 0:
        raise UserError(f"{corpus.name}: holds no text; name files with some")
    if held_out_fraction and not splits["held_out"].num_documents and num_documents > 1:
        splits, _ = write_once(corpus, out, tokenizer, least + 1, num_shard_rows)
    return splits


def write_once(
    corpus: Corpus, out: Path, tokenizer: Tokenizer, below: int, num_shard_rows: int
) -> tuple[dict[str, DataSplit], int]:
    """Write all shards, holding out what hashes below a value; returns the least hash as well."""
    for leftover in out.glob("*.arrow"):
        leftover.unlink()
    least = 2**64
    with ExitStack() as stack:
        writers = {
            name: SplitWriter(stack, out, name, tokenizer, num_shard_rows) for name in SPLITS
        }
        for texts in grouped(corpus.documents()):
            for text, tokens in zip(texts, tokenizer.encode(texts), strict=True):
                value = hash_of(text)
                least = min(least, value)
                writers["held_out" if value < below else "train"].append(tokens)
    return {name: writer.split() for name, writer in writers.items()}, least


def hash_of(text: str) -> int:
    """The first 64 bits of a document's SHA-256."""
    return int.from_bytes(sha256(text.encode()).digest()[:8], "big")


def grouped(texts: Iterable[str]) -> Iterator[list[str]]:
    """Documents in groups of about `NUM_CHARS_AT_ONCE`, for a tokenizer that works in parallel."""
    group: list[str] = []
    num_chars = 0
    for text in texts:
        group.append(text)
        num_chars += len(text)
        if num_chars >= NUM_CHARS_AT_ONCE:
            yield group
            group, num_chars = [], 0
    if group:
        yield group


class SplitWriter:
    """The two columns of one split: its tokens, and the positions where its documents start."""

    def __init__(
        self, stack: ExitStack, out: Path, name: str, tokenizer: Tokenizer, num_shard_rows: int
    ) -> None:
        self._separator = np.array([tokenizer.separator])
        self._tokens = stack.enter_context(
            ColumnWriter(out, f"{name}-tokens", "token", dtype_of(tokenizer), num_shard_rows)
        )
        self._starts = stack.enter_context(
            ColumnWriter(out, f"{name}-starts", "start", "int64", num_shard_rows)
        )

    def append(self, tokens: np.ndarray) -> None:
        self._starts.append(np.array([self._tokens.num_rows]))
        self._tokens.append(self._separator)
        self._tokens.append(tokens)

    def split(self) -> DataSplit:
        """What was written, once the columns are closed."""
        return DataSplit(
            num_tokens=self._tokens.num_rows,
            num_documents=self._starts.num_rows,
            tokens=tuple(self._tokens.files),
            starts=tuple(self._starts.files),
        )


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
