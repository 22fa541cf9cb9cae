"""Windows of the token stream: tokens, targets and documents."""

from pathlib import Path

import numpy as np
import pytest
import torch

from pipelines.data import prepare
from pipelines.data.corpus import find_corpus
from pipelines.data.synthetic import RandomWindows
from pipelines.data.tokens import find_tokenizer
from pipelines.data.windows import Windows
from pipelines.errors import UserError

TEXTS = ["a" * 3, "b" * 50, "c", "d" * 17, "e" * 100, "f" * 2]
SEPARATOR = 256


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "in").mkdir()
    for i, text in enumerate(TEXTS):
        (tmp_path / "in" / f"{i}.txt").write_text(text)
    corpus = find_corpus(str(tmp_path / "in"))
    prepare(corpus, tmp_path / "out", find_tokenizer(), 0, num_shard_rows=13)
    return tmp_path / "out"


def token_stream() -> tuple[list[int], list[int]]:
    """All tokens, and the document number of each."""
    tokens = [token for text in TEXTS for token in (SEPARATOR, *text.encode())]
    return tokens, np.cumsum(np.array(tokens) == SEPARATOR).tolist()


@pytest.mark.parametrize("seq_len", [1, 8, 13, 40])
def test_windows_are_the_token_stream_in_order(folder: Path, seq_len: int):
    samples = Windows(folder, "train", seq_len)
    tokens, documents = token_stream()
    assert samples.num_samples == (len(tokens) - 1) // seq_len
    batch = samples.read(range(samples.num_samples))
    num_read = samples.num_samples * seq_len
    assert batch.tokens.flatten().tolist() == tokens[:num_read]
    assert batch.targets.flatten().tolist() == tokens[1 : num_read + 1]
    expected_documents = torch.tensor(documents[:num_read]).reshape(batch.tokens.shape)
    assert batch.documents.equal((expected_documents - expected_documents[:, :1]).to(torch.int32))


def test_batch_contains_the_requested_windows(folder: Path):
    samples = Windows(folder, "train", 8)
    batch, last, first = samples.read([5, 0]), samples.read([5]), samples.read([0])
    assert batch.tokens.equal(torch.cat([last.tokens, first.tokens]))
    assert batch.targets.equal(torch.cat([last.targets, first.targets]))
    assert (batch.tokens.dtype, batch.tokens.shape) == (torch.int64, (2, 8))
    assert (batch.documents.dtype, batch.documents.shape) == (torch.int32, (2, 8))
    assert batch.tokens.is_contiguous() and batch.targets.is_contiguous()
    assert samples.read([]).tokens.shape == (0, 8)


def test_documents_are_optional(folder: Path):
    assert Windows(folder, "train", 8, with_documents=False).read([0]).documents is None


@pytest.mark.parametrize("index", [-1, 22, 10**9])
def test_index_of_a_missing_window_is_refused(folder: Path, index: int):
    samples = Windows(folder, "train", 8)
    assert samples.num_samples == 22
    with pytest.raises(IndexError):
        samples.read([0, index])


@pytest.mark.parametrize(("split", "seq_len"), [("held_out", 8), ("train", 1000)])
def test_split_shorter_than_a_window_is_refused(folder: Path, split: str, seq_len: int):
    with pytest.raises(UserError, match=f"the {split} split has .* less than one window"):
        Windows(folder, split, seq_len)


def test_reading_leaves_no_file_open(folder: Path):
    open_files = Path("/proc/self/fd")
    before = len(list(open_files.iterdir()))
    samples = [Windows(folder, "train", 8) for _ in range(5)]
    assert len(list(open_files.iterdir())) == before
    assert samples[0].read([3]).tokens.equal(samples[4].read([3]).tokens)


def test_random_windows_are_one_token_stream():
    samples = RandomWindows("train", 16, vocab_size=100, num_samples=50, seed=3)
    batch = samples.read(range(50))
    assert batch.targets.flatten()[:-1].equal(batch.tokens.flatten()[1:])
    assert samples.read([7]).tokens.equal(batch.tokens[7:8])
    assert batch.tokens.min() >= 0 and batch.tokens.max() < 100
    assert batch.documents.shape == (50, 16)
    assert samples.read([]).tokens.shape == (0, 16)
    with pytest.raises(IndexError):
        samples.read([50])


def test_random_windows_differ_by_seed_and_split_only():
    def tokens(split: str, seed: int) -> torch.Tensor:
        return RandomWindows(split, 64, seed=seed, with_documents=False).read([0]).tokens

    assert tokens("train", 0).equal(tokens("train", 0))
    assert not tokens("train", 0).equal(tokens("train", 1))
    assert not tokens("train", 0).equal(tokens("held_out", 0))
