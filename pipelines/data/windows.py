"""Windows: the samples of a run, read from memory-mapped token shards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import torch

from pipelines.data.columns import Column
from pipelines.data.fetching import FetchedShards
from pipelines.data.prepared import Prepared, open_prepared
from pipelines.errors import UserError


class Batch(NamedTuple):
    """B windows of T tokens on the host; `targets` are the tokens shifted by one position.

    `tokens` and `targets` are int64, (B, T). `documents` is int32, (B, T), or None: positions of a
    row with equal numbers belong to the same document. The numbers have no meaning across rows.
    """

    tokens: torch.Tensor
    targets: torch.Tensor
    documents: torch.Tensor | None


class Samples(Protocol):
    """Map-style access to one split: sample i in 0..num_samples-1, in any order."""

    num_samples: int
    seq_len: int
    vocab_size: int
    digest: str
    """Identifies the data: with `num_samples` it determines the content of every sample id."""
    is_far: bool
    """Whether samples must be fetched before they can be read."""

    def read(self, indices: Sequence[int]) -> Batch:
        """These samples as one batch, (B, T) = (len(indices), seq_len)."""

    def reach(self) -> None:
        """Check that this machine can read the samples. Raises `DataUnreachable`."""

    def prefetch(self, indices: Sequence[int]) -> None:
        """Start to fetch these samples, if they are remote; returns at once."""

    def fetch(self, indices: Sequence[int], interrupt: Callable[[], None]) -> None:
        """Wait until these samples are local; the wait calls `interrupt`, which may raise."""


class Windows:
    """The windows of a split of prepared data.

    Window i holds the tokens `i x seq_len` up to and including `(i+1) x seq_len` of the split's
    stream, across shards and documents. So each token except the first is a target once; an
    incomplete window at the end is dropped. Every position is predicted. A separator belongs to the
    document that it starts. With attention within documents, a document's first token is predicted
    from the separator alone, and the next separator from the document that it ends.

    Raises `UserError` if the folder has no such data, a shard is damaged, or the split is shorter
    than one window.
    """

    def __init__(
        self, data: Path | Prepared, split: str, seq_len: int, *, with_documents: bool = True
    ) -> None:
        data = open_prepared(data) if isinstance(data, Path) else data
        index, self._shards = data.index, data.shards
        self.is_far = isinstance(self._shards, FetchedShards)
        stream = index.splits[split]
        self.seq_len = seq_len
        self.vocab_size = index.vocab_size
        self.digest = index.digest
        self.num_samples = max(0, stream.num_tokens - 1) // seq_len
        if self.num_samples == 0:
            raise UserError(
                f"{data.place}: the {split} split has {stream.num_tokens} tokens, less than one "
                f"window of {seq_len} + 1; give more text, a smaller data.seq_len or another "
                "held-out fraction"
            )
        self._tokens = Column(self._shards, "token", index.dtype, stream.tokens)
        self._starts = (
            Column(self._shards, "start", "int64", stream.starts) if with_documents else None
        )

    def read(self, indices: Sequence[int]) -> Batch:
        """These windows as one batch; raises `IndexError` for one that does not exist."""
        tokens = np.empty((len(indices), self.seq_len + 1), dtype=np.int64)
        for row, index in zip(tokens, indices, strict=True):
            if not 0 <= index < self.num_samples:
                raise IndexError(f"sample {index} of {self.num_samples}")
            self._tokens.read_into(index * self.seq_len, row)
        return batch_of(tokens, self._documents(indices))

    def reach(self) -> None:
        """Check that remote shards can be fetched. Raises `DataUnreachable`."""
        if isinstance(self._shards, FetchedShards):
            self._shards.reach()

    def prefetch(self, indices: Sequence[int]) -> None:
        """Start to fetch the shards of these windows, if they are remote; returns at once."""
        if isinstance(self._shards, FetchedShards):
            self._shards.prefetch(self._files_of(indices))

    def fetch(self, indices: Sequence[int], interrupt: Callable[[], None]) -> None:
        """Wait until the shards of these windows are local; the wait calls `interrupt`."""
        if isinstance(self._shards, FetchedShards):
            for name in self._files_of(indices):
                self._shards.opened(name, interrupt)

    def _files_of(self, indices: Sequence[int]) -> list[str]:
        names: dict[str, None] = {}
        for index in indices:
            first = index * self.seq_len
            names |= dict.fromkeys(self._tokens.files_of(first, self.seq_len + 1))
            if self._starts is not None:
                names |= dict.fromkeys(self._starts.files_between(first, first + self.seq_len - 1))
        return list(names)

    def _documents(self, indices: Sequence[int]) -> np.ndarray | None:
        if self._starts is None:
            return None
        documents = np.zeros((len(indices), self.seq_len), dtype=np.int32)
        for row, index in zip(documents, indices, strict=True):
            first = index * self.seq_len
            before = self._starts.count_up_to(first)
            starts = np.empty(self._starts.count_up_to(first + self.seq_len - 1) - before, np.int64)
            self._starts.read_into(before, starts)
            row[starts - first] = 1
        return documents.cumsum(axis=1, dtype=np.int32)


def batch_of(windows: np.ndarray, documents: np.ndarray | None) -> Batch:
    """A batch of windows of T + 1 tokens: int64, (B, T + 1)."""
    return Batch(
        tokens=torch.from_numpy(windows[:, :-1].copy()),
        targets=torch.from_numpy(windows[:, 1:].copy()),
        documents=None if documents is None else torch.from_numpy(documents),
    )


def verify(place: str | Path) -> None:
    """Read all prepared data of a folder; raise `UserError` naming the first damaged file."""
    data = open_prepared(place)
    for split in data.index.splits.values():
        Column(data.shards, "token", data.index.dtype, split.tokens).verify()
        Column(data.shards, "start", "int64", split.starts).verify()
