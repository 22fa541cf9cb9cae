"""Packed chat data: conversations packed into sequences of equal length, stored as one file."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from hashlib import sha256

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.numpy import load, save

from actors.storage.credentials import without_credentials
from actors.storage.storage import is_remote, open_storage
from pipelines.data.chats import Conversation, Rendering, conversations_in, find_rendering
from pipelines.data.corpus import Corpus, file_errors_reported, find_corpus
from pipelines.data.opening import DataPlan
from pipelines.data.prepare import hash_of
from pipelines.data.source_files import SourceFile
from pipelines.data.windows import Batch
from pipelines.errors import UserError
from pipelines.settings.home import expand_home

FORMAT = "elastic-chats/1"
FILE = "chats.safetensors"
NUM_OPEN_ROWS = 64
"""A conversation goes into the first of at most this many open sequences that has room for it."""
IGNORED = -100


class PackedChats:
    """The sequences of one split; see `pipelines.data.windows.Samples`."""

    is_far = False

    def __init__(self, place: str, split: str) -> None:
        """Raises `UserError` if the file is missing or damaged."""
        try:
            stored = load(open_storage(place).read(FILE))
            self._tokens, self._targets, self._documents = (
                stored[f"{split}.{name}"] for name in ("tokens", "targets", "documents")
            )
            self.vocab_size = int(stored["vocab_size"])
        except (OSError, SafetensorError, KeyError) as error:
            raise UserError(
                f"{place}/{FILE}: cannot be read ({error}); delete it and start again"
            ) from None
        self.num_samples, self.seq_len = self._tokens.shape
        if not self.num_samples:
            raise UserError(
                f"{place}: the {split} split has no conversation; give more of them, or change "
                "data.held_out_fraction"
            )
        digest = sha256()
        for part in (self._tokens, self._targets, self._documents):
            digest.update(part.tobytes())
        self.digest = digest.hexdigest()

    def read(self, indices: Sequence[int]) -> Batch:
        """These sequences as one batch: int64, (B, T)."""
        rows = np.asarray(indices)
        return Batch(
            torch.from_numpy(self._tokens[rows].astype(np.int64)),
            torch.from_numpy(self._targets[rows].astype(np.int64)),
            torch.from_numpy(self._documents[rows].astype(np.int32)),
        )

    def reach(self) -> None:
        """Nothing to do: the sequences are in memory."""

    def prefetch(self, indices: Sequence[int]) -> None:
        """Nothing to do: the sequences are in memory."""

    def fetch(self, indices: Sequence[int], interrupt: Callable[[], None]) -> None:
        """Nothing to do: the sequences are in memory."""


def prepare_chats(
    source: str,
    cache: str,
    seq_len: int,
    *,
    tokenizer: str = "bytes",
    separator: str | None = None,
    held_out_fraction: float = 0.02,
) -> str:
    """The place under `cache` of a JSONL file's packed conversations, packed now if need be.

    The split of a conversation depends on its text alone, as in `pipelines.data.prepare`. A
    conversation longer than a sequence is truncated. Raises `UserError`.
    """
    resolved = find_chats(source, cache, seq_len, tokenizer, separator, held_out_fraction)
    assert resolved.place is not None and resolved.corpus is not None
    if not resolved.is_there():
        rendering, [file] = find_rendering(tokenizer, separator), resolved.corpus.files
        packed = save(_packed(file, rendering, seq_len, held_out_fraction))
        open_storage(resolved.place).write(FILE, packed)
    return resolved.place


def find_chats(
    source: str,
    cache: str,
    seq_len: int,
    tokenizer: str = "bytes",
    separator: str | None = None,
    held_out_fraction: float = 0.02,
) -> DataPlan:
    """The file of conversations, and the place of their packed form. Raises `UserError`."""
    file = _chat_file(source)
    rendering = find_rendering(tokenizer, separator)
    with file_errors_reported(file):
        content = sha256(file.read_bytes()).hexdigest()
    inputs = [FORMAT, content, rendering.name, seq_len]
    digest = sha256(json.dumps([*inputs, held_out_fraction]).encode()).hexdigest()
    place = open_storage(cache).at(f"chats-{digest[:16]}").url
    return DataPlan(place, Corpus(source, (file,)), whole=FILE)


def _chat_file(source: str) -> SourceFile:
    if not is_remote(source):
        file = expand_home(source.removeprefix("file://"))
        if not file.is_file():
            raise UserError(f"--data {source}: not a file; name a JSONL file of conversations")
        return file
    [found, *others] = find_corpus(source).files
    if others:
        raise UserError(
            f"--data {without_credentials(source)}: {1 + len(others)} files; name one JSONL file "
            "of conversations"
        )
    return found


def _packed(
    file: SourceFile, rendering: Rendering, seq_len: int, held_out_fraction: float
) -> dict[str, np.ndarray]:
    below = int(held_out_fraction * 2**64)
    rendered = [
        (hash_of(json.dumps(messages)), rendering.render(messages, where))
        for messages, where in conversations_in(file)
    ]
    if not rendered:
        raise UserError(f"{file}: has no conversation; each line should be one")
    smallest = min(value for value, _ in rendered)
    if held_out_fraction and len(rendered) > 1 and smallest >= below:
        below = smallest + 1
    arrays = {"vocab_size": np.array(rendering.vocab_size)}
    for split, is_held_out in (("train", False), ("held_out", True)):
        members = [chat for value, chat in rendered if (value < below) is is_held_out]
        tokens, targets, documents = pack(members, seq_len)
        arrays |= {f"{split}.tokens": tokens, f"{split}.targets": targets}
        arrays |= {f"{split}.documents": documents}
    return arrays


def pack(
    conversations: Sequence[Conversation], seq_len: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens, targets and documents, int32, (sequences, seq_len).

    A token's target is the next token of its conversation if that is part of a response. The rest
    of a sequence is padded with zeros: a separate document without targets. Conversations without
    a response within `seq_len` are dropped.
    """
    rows: list[list[Conversation]] = []
    room: dict[int, int] = {}
    for conversation in conversations:
        cut = Conversation(
            conversation.tokens[: seq_len + 1], conversation.is_response[: seq_len + 1]
        )
        length = len(cut.tokens) - 1
        if not any(cut.is_response[1:]):
            continue
        row = next((number for number, left in room.items() if left >= length), len(rows))
        if row == len(rows):
            rows.append([])
            room[row] = seq_len
        rows[row].append(cut)
        room[row] -= length
        if not room[row] or len(room) > NUM_OPEN_ROWS:
            del room[row if not room[row] else next(iter(room))]
    shape = (len(rows), seq_len)
    tokens, documents = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    targets = np.full(shape, IGNORED, np.int32)
    for number, conversations_of_row in enumerate(rows):
        end = 0
        for document, cut in enumerate(conversations_of_row):
            begin, end = end, end + len(cut.tokens) - 1
            tokens[number, begin:end] = cut.tokens[:-1]
            counted = np.asarray(cut.is_response[1:])
            targets[number, begin:end] = np.where(counted, cut.tokens[1:], IGNORED)
            documents[number, begin:end] = document
        documents[number, end:] = len(conversations_of_row)
    return tokens, targets, documents
