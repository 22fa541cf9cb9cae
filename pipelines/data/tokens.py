"""Tokenizers: text to token ids, by bytes or with a Hugging Face `tokenizers` file."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Protocol

import numpy as np
import tokenizers

from pipelines.errors import UserError
from pipelines.settings.home import expand_home

SEPARATORS = ("<|endoftext|>", "<|end_of_text|>", "<|begin_of_text|>", "</s>", "<eos>", "[SEP]")
"""Tokens that separate documents in common vocabularies; the first one in a vocabulary is used."""


class Tokenizer(Protocol):
    """Text to token ids in 0..vocab_size-1; `separator` is the id between documents."""

    name: str
    """Identifies the mapping: equal names give equal tokens."""
    vocab_size: int
    separator: int

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The tokens of each text, without separators: 1-D integer arrays."""

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens; separators are skipped."""


class ByteTokenizer:
    """The UTF-8 bytes as tokens 0..255, and 256 as the separator."""

    name = "bytes"
    vocab_size = 257
    separator = 256

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.frombuffer(text.encode(), dtype=np.uint8) for text in texts]

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(token for token in tokens if token < 256).decode(errors="replace")


class FileTokenizer:
    """A `tokenizer.json` of the Hugging Face `tokenizers` library.

    `separator` names the token between documents. If it is None, the first of `SEPARATORS` in the
    vocabulary is used, or else a new id after the vocabulary. Truncation, padding and special
    tokens that the file configures are disabled. Raises `UserError` if the file cannot be read or
    has no such token.
    """

    def __init__(self, file: Path, separator: str | None = None) -> None:
        content = read_bytes(file)
        try:
            self._tokenizer = tokenizers.Tokenizer.from_buffer(content)
        except Exception as error:  # the library raises nothing narrower
            raise UserError(
                f"{file}: not a `tokenizers` JSON file ({error}); give 'bytes' or such a file"
            ) from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        num_known = max(vocabulary.values(), default=-1) + 1
        if separator is not None and separator not in vocabulary:
            raise UserError(f"{file}: has no token {separator!r}; change data.separator")
        known = [token for token in (separator, *SEPARATORS) if token in vocabulary]
        self.separator = vocabulary[known[0]] if known else num_known
        self.vocab_size = max(num_known, self.separator + 1)
        self.name = f"{sha256(content).hexdigest()}/{self.separator}"

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        encoded = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.asarray(encoding.ids, dtype=np.uint32) for encoding in encoded]

    def decode(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode([token for token in tokens if token != self.separator])


def read_bytes(file: Path) -> bytes:
    """The content of a tokenizer's file. Raises `UserError`."""
    try:
        return file.read_bytes()
    except OSError as error:
        raise UserError(
            f"{file}: cannot read the tokenizer ({error.strerror}); give 'bytes' or a JSON file"
        ) from error


def find_tokenizer(name: str = "bytes", separator: str | None = None) -> Tokenizer:
    """The tokenizer that a recipe names: 'bytes', or the path of a `tokenizers` JSON file."""
    return ByteTokenizer() if name == "bytes" else FileTokenizer(expand_home(name), separator)
