"""Preparation of a corpus: text becomes memory-mapped Arrow token shards in a folder or at a URL.

The corpus is streamed, and is prepared once: the index, written last, marks finished data.
"""

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
from pipelines.errors import UserError

HELD_OUT_FRACTION = 0.02
NUM_CHARS_AT_ONCE = 1 << 20
"""Documents are tokenized together up to this total length."""
FETCHED_SHARD_ROWS = 1 << 23
"""Rows of a shard at a URL: small, because reading one sample may fetch the whole shard."""
READ_BYTES = 1 << 23
SUFFIX = ".arrow"
"""Files with this suffix may be left by an interrupted upload; the next upload replaces them."""


def prepare_at(
    corpus: Corpus, place: str, tokenizer: Tokenizer, held_out_fraction: float = HELD_OUT_FRACTION
) -> Index:
    """Like `prepare`, for a folder or a URL. For a URL all shards are first written to a temporary
    folder of this machine. Raises `UserError`."""
    if not is_remote(place):
        return prepare(corpus, Path(place.removeprefix("file://")), tokenizer, held_out_fraction)
    storage = named_place(place)
    try:
        if storage.size(INDEX) is not None:
            index = read_index(storage)
            digest = input_digest(corpus, tokenizer, held_out_fraction)
            refuse_other(without_credentials(place), index, digest)
            return index
        others = sorted(name for name in storage.files() if not name.endswith(SUFFIX))
        if others:
            raise UserError(
                f"{without_credentials(place)}: holds other files, such as {others[0]}; name a new "
                "or empty folder"
            )
        with tempfile.TemporaryDirectory(prefix="elastic-prepare-") as folder:
            local = Path(folder) / "out"
            index = prepare(corpus, local, tokenizer, held_out_fraction, FETCHED_SHARD_ROWS)
            return _upload(local, index, storage)
    except OSError as error:
        cause = without_credentials(str(error).splitlines()[0])
        raise UserError(
            f"{without_credentials(place)}: cannot write prepared data there ({cause}); check its "
            "permissions and the credentials in the environment"
        ) from None


def _upload(local: Path, index: Index, storage: Storage) -> Index:
    for split in index.splits.values():
        for shard in (*split.tokens, *split.starts):
            with (local / shard.name).open("rb") as file, storage.writing(shard.name) as out:
                while data := file.read(READ_BYTES):
                    out.write(data)
    write_index(storage, index)
    return index


def prepare(
    corpus: Corpus,
    out: Path,
    tokenizer: Tokenizer,
    held_out_fraction: float = HELD_OUT_FRACTION,
    num_shard_rows: int = NUM_SHARD_ROWS,
) -> Index:
    """Turn a corpus into token shards in the folder `out`, unless they are there already.

    A document starts with the separator. It belongs to the held-out split if the SHA-256 of its
    text is below that fraction of all values. So equal documents share a split, and the order of
    files does not matter. If no document qualifies, the one with the smallest hash is held out.

    Memory is bounded by about 1 M tokens a split and the longest document. The index is written
    last, so an interrupted preparation is invisible and starts again. A second process waits for
    the first.

    Raises `UserError` if the corpus is empty or cannot be read, if `out` cannot be written, or
    if it holds other files.
    """
    if not 0 <= held_out_fraction < 1:
        raise UserError(f"held-out fraction {held_out_fraction}: give a part of 1, such as 0.02")
    digest = input_digest(corpus, tokenizer, held_out_fraction)
    with writable(out):
        if (out / INDEX).is_file():
            return finished(out, digest)
        claim(out)
        with locked(out):
            if (out / INDEX).is_file():
                return finished(out, digest)
            splits = write_splits(corpus, out, tokenizer, held_out_fraction, num_shard_rows)
            index = Index(
                format=FORMAT,
                source=corpus.name,
                input=digest,
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
    """A digest of the inputs of `prepare`, computed without reading the corpus."""
    inputs = [FORMAT, corpus.fingerprint(), tokenizer.name, held_out_fraction]
    return sha256(json.dumps(inputs).encode()).hexdigest()


def dtype_of(tokenizer: Tokenizer) -> Literal["uint16", "uint32"]:
    """The smallest dtype that holds every token id."""
    return "uint16" if tokenizer.vocab_size <= 1 << 16 else "uint32"


@contextmanager
def writable(out: Path) -> Iterator[None]:
    """Turn an `OSError` of writing the folder into a `UserError`."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{out}: cannot write prepared data here ({error.strerror}); name another folder"
        ) from error


def claim(out: Path) -> None:
    """Mark the folder as one of prepared data; it must be new, empty or partly prepared."""
    out.mkdir(parents=True, exist_ok=True)
    others = [file for file in out.iterdir() if file.name != LOCK]
    if others and not is_prepared(out):  # in this order: others appear only after the lock
        raise UserError(f"{out}: holds other files; name a new or empty folder")
    (out / LOCK).touch()


@contextmanager
def locked(out: Path) -> Iterator[None]:
    """Lock the folder exclusively; the kernel releases the lock however the process ends."""
    with (out / LOCK).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def finished(out: Path, digest: str) -> Index:
    """The index of a prepared folder. Raises `UserError` if its inputs were others."""
    index = read_index(out)
    refuse_other(str(out), index, digest)
    return index


def refuse_other(place: str, index: Index, digest: str) -> None:
    """Raise `UserError` unless the data were prepared from the inputs of this digest."""
    if index.input != digest:
        raise UserError(
            f"{place}: was prepared from other text or settings ({index.source}); "
            "name another folder or delete it"
        )


def write_splits(
    corpus: Corpus, out: Path, tokenizer: Tokenizer, held_out_fraction: float, num_shard_rows: int
) -> dict[str, DataSplit]:
    """Write all shards; once more if no document fell into the held-out split."""
    below = int(held_out_fraction * 2**64)
    splits, smallest = write_once(corpus, out, tokenizer, below, num_shard_rows)
    num_documents = sum(split.num_documents for split in splits.values())
    if num_documents == 0:
        raise UserError(f"{corpus.name}: has no text; name files with some")
    if held_out_fraction and not splits["held_out"].num_documents and num_documents > 1:
        splits, _ = write_once(corpus, out, tokenizer, smallest + 1, num_shard_rows)
    return splits


def write_once(
    corpus: Corpus, out: Path, tokenizer: Tokenizer, below: int, num_shard_rows: int
) -> tuple[dict[str, DataSplit], int]:
    """Write all shards, holding out documents whose hash is smaller than `below`.

    Returns the splits and the smallest hash.
    """
    for leftover in out.glob("*.arrow"):
        leftover.unlink()
    smallest = 2**64
    with ExitStack() as stack:
        writers = {
            name: SplitWriter(stack, out, name, tokenizer, num_shard_rows) for name in SPLITS
        }
        for texts in grouped(corpus.documents()):
            for text, tokens in zip(texts, tokenizer.encode(texts), strict=True):
                value = hash_of(text)
                smallest = min(smallest, value)
                writers["held_out" if value < below else "train"].append(tokens)
    return {name: writer.split() for name, writer in writers.items()}, smallest


def hash_of(text: str) -> int:
    """The first 64 bits of a document's SHA-256."""
    return int.from_bytes(sha256(text.encode()).digest()[:8], "big")


def grouped(texts: Iterable[str]) -> Iterator[list[str]]:
    """Documents in groups of about `NUM_CHARS_AT_ONCE`, which a tokenizer encodes in parallel."""
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
    """Writer of one split's two columns: its tokens, and the start position of each document."""

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
        """Add one document, preceded by the separator."""
        self._starts.append(np.array([self._tokens.num_rows]))
        self._tokens.append(self._separator)
        self._tokens.append(tokens)

    def split(self) -> DataSplit:
        """The written split; valid once the columns are closed."""
        return DataSplit(
            num_tokens=self._tokens.num_rows,
            num_documents=self._starts.num_rows,
            tokens=tuple(self._tokens.files),
            starts=tuple(self._starts.files),
        )
