"""Corpus formats: documents are read unchanged, or a one-line error names the problem."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipelines.data.corpus import WHOLE_TEXT_BYTES, documents_in
from pipelines.errors import UserError

TEXTS = ["first\n", "zweites: äöü", "", "three 漢字 \U0001f600\n\n"] + [
    f"no {i}" for i in range(600)
]


def write_jsonl(file: Path) -> None:
    lines = [json.dumps({"text": text, "id": i}) for i, text in enumerate(TEXTS)]
    file.write_text("\n\n".join(lines))


def make_table(kind: pa.DataType) -> pa.Table:
    texts = pa.array([*TEXTS, None], pa.string()).cast(kind)
    return pa.table({"id": range(len(texts)), "text": texts})


def write_arrow_file(file: Path, kind: pa.DataType | None = None) -> None:
    content = make_table(kind or pa.string())
    with pa.ipc.new_file(file, content.schema) as writer:
        writer.write_table(content, max_chunksize=100)


def write_arrow_stream(file: Path) -> None:
    with pa.ipc.new_stream(file, make_table(pa.string()).schema) as writer:
        writer.write_table(make_table(pa.string()))


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("a.jsonl", write_jsonl),
        ("a.parquet", lambda file: pq.write_table(make_table(pa.large_string()), file)),
        ("file.arrow", write_arrow_file),
        ("stream.arrow", write_arrow_stream),
        ("words.arrow", lambda file: write_arrow_file(file, pa.dictionary(pa.int32(), pa.utf8()))),
    ],
)
def test_documents_are_read_in_order(tmp_path: Path, name: str, write):
    write(tmp_path / name)
    assert list(documents_in(tmp_path / name)) == TEXTS


def test_text_file_is_one_document_with_the_same_bytes(tmp_path: Path):
    file = tmp_path / "a.txt"
    file.write_bytes("one\r\ntwo\n\rthree ä".encode())
    assert list(documents_in(file)) == ["one\r\ntwo\n\rthree ä"]


def test_large_text_file_is_split_into_documents_at_line_ends(tmp_path: Path):
    text = "".join(f"line {i} of a long text, ä\n" for i in range(60_000))
    file = tmp_path / "a.txt"
    file.write_text(text)
    documents = list(documents_in(file))
    assert file.stat().st_size > WHOLE_TEXT_BYTES
    assert "".join(documents) == text
    assert len(documents) > 10
    assert all(document.endswith("\n") for document in documents)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b"{nonsense", "not JSON"),
        (b'{"text": "\xff"}', "not JSON"),
        (b'{"body": "x"}', "no text"),
        (b'["text"]', "no text"),
        (b'{"text": 7}', "no text"),
        (b'{"text": "\\ud800"}', "surrogate"),
    ],
)
def test_bad_line_is_named(tmp_path: Path, line: bytes, problem: str):
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'{"text": "good"}\n\n' + line + b"\n")
    with pytest.raises(UserError, match=rf"a\.jsonl, line 3: .*{problem}") as caught:
        list(documents_in(file))
    assert "\n" not in str(caught.value)


def test_text_that_is_not_utf8_is_named(tmp_path: Path):
    (tmp_path / "latin.txt").write_bytes("ä".encode("latin-1"))
    with pytest.raises(UserError, match=r"latin\.txt: not UTF-8"):
        list(documents_in(tmp_path / "latin.txt"))


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
@pytest.mark.parametrize(
    ("columns", "problem"),
    [
        ({"body": ["x"]}, r"has no column 'text', only body"),
        ({"text": [1]}, "is int64, not text"),
    ],
)
def test_table_without_text_is_named(tmp_path: Path, suffix: str, columns, problem: str):
    file = tmp_path / f"a.{suffix}"
    content = pa.table(columns)
    if suffix == "parquet":
        pq.write_table(content, file)
    else:
        with pa.ipc.new_file(file, content.schema) as writer:
            writer.write_table(content)
    with pytest.raises(UserError, match=rf"a\.{suffix}: .*{problem}"):
        list(documents_in(file))


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
@pytest.mark.parametrize("content", [b"", b"not a table at all, but long enough", None])
def test_file_that_is_not_a_table_is_named(tmp_path: Path, suffix: str, content: bytes | None):
    file = tmp_path / f"a.{suffix}"
    if content is None:
        write_arrow_file(file)
        content = file.read_bytes()[:-100]
    file.write_bytes(content)
    with pytest.raises(UserError, match=rf"a\.{suffix}: ") as caught:
        list(documents_in(file))
    assert "\n" not in str(caught.value)
