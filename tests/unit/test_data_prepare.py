"""Preparation of token shards: complete, once, and independent of the files' layout."""

import json
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipelines.cli import main
from pipelines.data import prepare
from pipelines.data.columns import Column
from pipelines.data.corpus import Corpus, find_corpus
from pipelines.data.opening import prepared_folder
from pipelines.data.shards import INDEX, FolderShards, Index, read_index
from pipelines.data.tokens import find_tokenizer
from pipelines.data.windows import verify
from pipelines.errors import UserError

TEXTS = [f"document {i}: " + "ä word " * (i % 7) for i in range(200)] + ["long " * 1000]


def write_texts(folder: Path, kind: str, texts: list[str] = TEXTS) -> Path:
    folder.mkdir(exist_ok=True)
    content = pa.table({"text": texts})
    if kind == "txt":
        for i, text in enumerate(texts):
            (folder / f"{i:04d}.txt").write_text(text)
    elif kind == "jsonl":
        lines = [json.dumps({"text": text}) for text in texts]
        (folder / "a.jsonl").write_text("\n".join(lines))
    elif kind == "parquet":
        pq.write_table(content, folder / "a.parquet", row_group_size=50)
    else:
        with pa.ipc.new_file(folder / "a.arrow", content.schema) as writer:
            writer.write_table(content, max_chunksize=30)
    return folder


def prepare_corpus(
    source: Path, out: Path, num_shard_rows: int = 1000, fraction: float = 0.1
) -> Index:
    return prepare(find_corpus(str(source)), out, find_tokenizer(), fraction, num_shard_rows)


def read_split(folder: Path, split: str) -> list[str]:
    """The documents of a split, read back from its columns."""
    index = read_index(folder)
    split_index = index.splits[split]
    tokens = np.empty(split_index.num_tokens, np.int64)
    Column(FolderShards(folder), "token", index.dtype, split_index.tokens).read_into(0, tokens)
    starts = np.empty(split_index.num_documents, np.int64)
    Column(FolderShards(folder), "start", "int64", split_index.starts).read_into(0, starts)
    assert (tokens[starts] == index.separator).all()
    pieces = np.split(tokens, starts[1:])
    return [bytes(piece[1:].tolist()).decode() for piece in pieces]


@pytest.mark.parametrize("kind", ["txt", "jsonl", "parquet", "arrow"])
def test_every_document_is_stored_once_in_order(tmp_path: Path, kind: str):
    index = prepare_corpus(write_texts(tmp_path / "in", kind), tmp_path / "out")
    train, held_out = (
        read_split(tmp_path / "out", "train"),
        read_split(tmp_path / "out", "held_out"),
    )
    assert sorted(train + held_out) == sorted(TEXTS)
    assert train == [text for text in TEXTS if text in set(train)]
    assert len(index.splits["train"].tokens) > 5, "several shards, one document longer than any"
    assert 8 < len(held_out) < 35
    verify(tmp_path / "out")


def test_digest_depends_on_the_data_not_on_the_files(tmp_path: Path):
    digests = {
        prepare_corpus(write_texts(tmp_path / kind, kind), tmp_path / f"out-{kind}", rows).digest
        for kind, rows in [("txt", 1000), ("jsonl", 1000), ("parquet", 77), ("arrow", 10**6)]
    }
    assert len(digests) == 1
    other = prepare_corpus(
        write_texts(tmp_path / "in", "jsonl", [*TEXTS, "more"]), tmp_path / "other"
    )
    assert other.digest not in digests


def test_held_out_split_does_not_depend_on_the_order(tmp_path: Path):
    prepare_corpus(write_texts(tmp_path / "in", "jsonl"), tmp_path / "a")
    prepare_corpus(write_texts(tmp_path / "back", "jsonl", [*TEXTS[::-1], "new"]), tmp_path / "b")
    assert set(read_split(tmp_path / "b", "held_out")) - {"new"} == set(
        read_split(tmp_path / "a", "held_out")
    )


def test_one_of_few_documents_is_held_out(tmp_path: Path):
    source = write_texts(tmp_path / "in", "txt", ["one", "two", "three"])
    index = prepare_corpus(source, tmp_path / "out", fraction=1e-9)
    assert index.splits["held_out"].num_documents == 1
    assert index.splits["train"].num_documents == 2
    assert (
        prepare_corpus(source, tmp_path / "none", fraction=0).splits["held_out"].num_documents == 0
    )


def test_second_prepare_reuses_the_first(tmp_path: Path):
    source = write_texts(tmp_path / "in", "txt")
    first = prepare_corpus(source, tmp_path / "out")
    times = {file: file.stat().st_mtime_ns for file in (tmp_path / "out").iterdir()}
    assert prepare_corpus(source, tmp_path / "out") == first
    assert times == {file: file.stat().st_mtime_ns for file in (tmp_path / "out").iterdir()}


def test_concurrent_prepares_prepare_once(tmp_path: Path):
    source = write_texts(tmp_path / "in", "jsonl")
    with ThreadPoolExecutor(4) as pool:
        indexes = list(pool.map(lambda _: prepare_corpus(source, tmp_path / "out"), range(4)))
    assert indexes == [indexes[0]] * 4
    verify(tmp_path / "out")


@dataclass(frozen=True)
class Interrupted(Corpus):
    """A corpus that fails while it is read."""

    def documents(self) -> Iterator[str]:
        yield "x" * 5000
        yield "y" * 1_100_000
        raise KeyboardInterrupt


def test_interrupted_prepare_is_invisible_and_starts_again(tmp_path: Path):
    source = write_texts(tmp_path / "in", "txt")
    corpus = find_corpus(str(source))
    with pytest.raises(KeyboardInterrupt):
        prepare(Interrupted("", corpus.files), tmp_path / "out", find_tokenizer(), 0.1, 100_000)
    leftover_shards = set((tmp_path / "out").glob("*.arrow"))
    assert leftover_shards and not (tmp_path / "out" / INDEX).exists()
    with pytest.raises(UserError, match="prepare the data in"):
        read_index(tmp_path / "out")
    prepare_corpus(source, tmp_path / "out")
    assert prepare_corpus(source, tmp_path / "again") == read_index(tmp_path / "out")
    names = [{file.name for file in (tmp_path / out).iterdir()} for out in ("out", "again")]
    assert names[0] == names[1]


def test_prepare_overwrites_no_other_files(tmp_path: Path):
    source = write_texts(tmp_path / "in", "txt")
    with pytest.raises(UserError, match="holds other files"):
        prepare_corpus(source, source)
    prepare_corpus(source, tmp_path / "out")
    with pytest.raises(UserError, match="was prepared from other text or settings"):
        prepare_corpus(source, tmp_path / "out", fraction=0.5)
    assert len(list(source.iterdir())) == len(TEXTS)


def test_corpus_without_text_is_refused(tmp_path: Path):
    source = write_texts(tmp_path / "in", "txt", ["", ""])
    with pytest.raises(UserError, match="has no text"):
        prepare_corpus(source, tmp_path / "out")


def test_unwritable_folder_is_named(tmp_path: Path):
    source = write_texts(tmp_path / "in", "txt", ["a"])
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"file/out: cannot write prepared data here \(Not a dir"):
        prepare_corpus(source, tmp_path / "file" / "out")


@pytest.mark.parametrize("fraction", [-0.1, 1.0])
def test_invalid_held_out_fraction_is_refused(tmp_path: Path, fraction: float):
    source = write_texts(tmp_path / "in", "txt", ["a"])
    with pytest.raises(UserError, match="held-out fraction"):
        prepare_corpus(source, tmp_path / "out", fraction=fraction)


def test_data_are_prepared_once_per_storage(tmp_path: Path):
    source = write_texts(tmp_path / "in", "txt")
    cache = str(tmp_path / "cache")
    first = prepared_folder(str(source), cache)
    assert prepared_folder(str(source), cache) == first
    assert prepared_folder(str(first), cache) == first, "prepared data are used as they are"
    second = prepared_folder(str(source), cache, held_out_fraction=0.2)
    assert second != first
    assert set((tmp_path / "cache").iterdir()) == {Path(first), Path(second)}
    assert prepared_folder("random", cache) is None


def test_prepare_command_prints_how_to_train_on_its_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "text.txt").write_text("All happy families are alike. " * 200)
    folders = [str(tmp_path / "text.txt"), str(tmp_path / "shards")]
    monkeypatch.setattr(sys, "argv", ["elastic", "prepare", *folders])
    with pytest.raises(SystemExit) as exited:
        main()
    assert not exited.value.code
    assert f"--data {tmp_path / 'shards'}" in capsys.readouterr().out.replace("\n", "")
    verify(tmp_path / "shards")
