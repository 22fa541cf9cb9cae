"""Corpora: the files that `--data` selects, and the errors for bad ones."""

from pathlib import Path

import pytest

from pipelines.data.corpus import find_corpus
from pipelines.data.shards import LOCK
from pipelines.errors import UserError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("b.txt", "a/z.txt", "a/c.jsonl", "notes.md", ".hidden/x.txt", "prepared/t.arrow"):
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_text('{"text": "x"}\n')
    (tmp_path / "prepared" / LOCK).touch()
    return tmp_path


def test_folder_is_read_in_the_order_of_its_paths(folder: Path):
    names = [file.relative_to(folder).as_posix() for file in find_corpus(str(folder)).files]
    assert names == ["a/c.jsonl", "a/z.txt", "b.txt"]


def test_glob_and_file_select_the_named_files(folder: Path):
    assert [f.name for f in find_corpus(f"{folder}/**/*.txt").files] == ["z.txt", "b.txt"]
    assert find_corpus(f"{folder}/b.txt").files == (folder / "b.txt",)


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        ("missing", "no such file or folder"),
        ("*.parquet", "has no .*file"),
        ("notes.md", "not a .*file"),
        (".hidden/none", "no such file or folder"),
    ],
)
def test_data_without_readable_files_are_refused_in_one_line(folder: Path, data: str, problem: str):
    with pytest.raises(UserError, match=problem) as caught:
        find_corpus(f"{folder}/{data}")
    assert str(caught.value).startswith(f"--data {folder}/{data}: ")
    assert "\n" not in str(caught.value)


def test_folder_without_text_is_refused(tmp_path: Path):
    with pytest.raises(UserError, match="has no"):
        find_corpus(str(tmp_path))


def test_empty_documents_are_skipped(tmp_path: Path):
    (tmp_path / "a.txt").touch()
    (tmp_path / "b.txt").write_text("b")
    assert list(find_corpus(str(tmp_path)).documents()) == ["b"]


def test_changed_file_changes_the_fingerprint(folder: Path):
    before = find_corpus(str(folder)).fingerprint()
    assert find_corpus(str(folder)).fingerprint() == before
    (folder / "b.txt").write_text("more")
    assert find_corpus(str(folder)).fingerprint() != before


def test_vanished_file_is_named(folder: Path):
    corpus = find_corpus(str(folder))
    (folder / "b.txt").unlink()
    with pytest.raises(UserError, match=r"b\.txt: cannot be read"):
        corpus.fingerprint()
    with pytest.raises(UserError, match=r"b\.txt: cannot be read"):
        list(corpus.documents())


def test_default_corpus_is_the_standard_library():
    corpus = find_corpus()
    names = {file.name for file in corpus.files}
    assert {"argparse.py", "typing.py", "json"} - names == {"json"}
    assert not any(part in file.parts for file in corpus.files for part in ("test", "idlelib"))
    assert "Python" in corpus.name
