"""Tokenizers: text to tokens and back."""

from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from pipelines.data.tokens import find_tokenizer
from pipelines.errors import UserError

TEXT = "the order of samples is a function of the seed, whatever the world; ä 漢 \U0001f600"


def write_tokenizer(file: Path, *special: str, truncate: bool = False) -> None:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT] * 3, trainer)
    if truncate:
        tokenizer.enable_truncation(5)
        tokenizer.enable_padding(length=9)
    tokenizer.save(str(file))


def test_byte_tokenizer_encodes_bytes_as_themselves():
    tokenizer = find_tokenizer()
    (tokens,) = tokenizer.encode([TEXT])
    assert bytes(tokens.tolist()) == TEXT.encode()
    assert tokenizer.decode([tokenizer.separator, *tokens.tolist()]) == TEXT
    assert (tokenizer.vocab_size, tokenizer.separator) == (257, 256)


def test_tokenizer_file_encodes_whole_texts_without_truncation(tmp_path: Path):
    write_tokenizer(tmp_path / "t.json", "<|endoftext|>", truncate=True)
    tokenizer = find_tokenizer(str(tmp_path / "t.json"))
    first, second = tokenizer.encode([TEXT, "the"])
    assert tokenizer.decode(first.tolist()) == TEXT
    assert tokenizer.decode(second.tolist()) == "the"
    assert 5 < len(first) < len(TEXT.encode())
    assert max(first) < tokenizer.vocab_size


def test_separator_is_the_known_or_named_or_a_new_token(tmp_path: Path):
    write_tokenizer(tmp_path / "known.json", "<mine>", "<|endoftext|>")
    write_tokenizer(tmp_path / "none.json")
    known = find_tokenizer(str(tmp_path / "known.json"))
    named = find_tokenizer(str(tmp_path / "known.json"), "<mine>")
    none = find_tokenizer(str(tmp_path / "none.json"))
    assert (known.separator, named.separator) == (1, 0)
    assert none.separator == none.vocab_size - 1
    assert all(none.separator not in tokens for tokens in none.encode([TEXT]))
    assert len({known.name, named.name, none.name}) == 3


@pytest.mark.parametrize(
    ("content", "separator", "problem"),
    [
        (None, None, "cannot read the tokenizer"),
        ("{}", None, "not a `tokenizers` JSON file"),
        ("good", "<absent>", "no token '<absent>'"),
    ],
)
def test_bad_tokenizer_is_named(tmp_path: Path, content, separator, problem: str):
    file = tmp_path / "t.json"
    if content == "good":
        write_tokenizer(file)
    elif content:
        file.write_text(content)
    with pytest.raises(UserError, match=rf"t\.json: .*{problem}|t\.json: {problem}"):
        find_tokenizer(str(file), separator)
