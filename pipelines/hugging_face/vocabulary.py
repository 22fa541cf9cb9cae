"""Export of a run's tokenizer in the format of `transformers`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import tokenizers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from actors.storage.storage import open_storage
from pipelines.data.shards import Index, read_index
from pipelines.data.tokens import SEPARATORS, ByteTokenizer, find_tokenizer
from pipelines.errors import UserError
from pipelines.settings import DataSettings
from pipelines.settings.home import expand_home


class Vocabulary(NamedTuple):
    """The token between documents, and the tokenizer.

    Each is None if unknown; then `missing_reason` is the reason.
    """

    separator: int | None
    tokenizer: Tokenizer | None
    missing_reason: str = ""


def vocabulary_of(data: DataSettings, folder: str | None) -> Vocabulary:
    """The vocabulary of a run that was trained on the prepared data in `folder` (None: random)."""
    if folder is None:
        return Vocabulary(None, None, "the data are random")
    try:
        index = read_index(open_storage(folder))
    except (UserError, OSError) as error:
        return Vocabulary(None, None, str(error))
    if index.tokenizer == ByteTokenizer.name:
        return Vocabulary(index.separator, _with_separator(_byte_tokenizer(), index.separator))
    try:
        tokenizer = _file_tokenizer(data, index)
    except UserError as error:
        return Vocabulary(index.separator, None, str(error))
    return Vocabulary(index.separator, tokenizer)


def write_vocabulary(folder: Path, vocabulary: Vocabulary, seq_len: int) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json`, if the tokenizer is known."""
    tokenizer, separator = vocabulary.tokenizer, vocabulary.separator
    if tokenizer is None or separator is None:
        return
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": tokenizer.id_to_token(separator),
        "model_max_length": seq_len,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def _file_tokenizer(data: DataSettings, index: Index) -> Tokenizer:
    """The tokenizer as the data were prepared: without truncation, padding or added tokens."""
    if find_tokenizer(data.tokenizer, data.separator).name != index.tokenizer:
        raise UserError(
            f"the data were prepared with another tokenizer than data.tokenizer={data.tokenizer}"
        )
    tokenizer = tokenizers.Tokenizer.from_file(str(expand_home(data.tokenizer)))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.post_processor = None
    return _with_separator(tokenizer, index.separator)


def _byte_tokenizer() -> Tokenizer:
    """The UTF-8 bytes as tokens 0..255: a vocabulary of single bytes without merges."""
    tokenizer = Tokenizer(models.BPE(vocab=_byte_symbols(), merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _byte_symbols() -> dict[str, int]:
    """The character that `tokenizers` uses for each byte (Radford et al., GPT-2, 2019).

    A visible byte is its own character; the others get characters from 256 on.
    """
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in visible]
    symbols = {chr(byte): byte for byte in visible}
    return symbols | {chr(256 + place): byte for place, byte in enumerate(others)}


def _with_separator(tokenizer: Tokenizer, separator: int) -> Tokenizer:
    """The tokenizer with a token added for a separator whose id is beyond the vocabulary."""
    if tokenizer.id_to_token(separator) is None:
        tokenizer.add_special_tokens([SEPARATORS[0]])
    if tokenizer.id_to_token(separator) is None:
        raise UserError(f"no token with id {separator} can be added to the tokenizer")
    return tokenizer
