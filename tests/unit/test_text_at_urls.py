"""Text and conversations at URLs are prepared as those on this machine."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from actors.storage.remote_files import remote_files
from pipelines.custom_data.arrow import ArrowDataset
from pipelines.data.corpus import find_corpus
from pipelines.data.opening import find_data, prepared_folder
from pipelines.data.packing import FILE, find_chats, prepare_chats
from pipelines.errors import UserError
from pipelines.settings import CacheSettings

CHAT = b'{"prompt": "a", "response": "b"}\n{"prompt": "c", "response": "d"}\n'


@pytest.fixture
def local(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    (folder / "deep").mkdir(parents=True)
    (folder / "a.txt").write_text("one text\n" * 50)
    lines = [json.dumps({"text": f"line {number}"}) for number in range(9)]
    (folder / "deep/b.jsonl").write_text("\n".join(lines))
    table = pa.table({"text": [f"row {number}" for number in range(7)]})
    pq.write_table(table, folder / "deep/c.parquet")
    with pa.ipc.new_file(folder / "d.arrow", table.schema) as out:
        out.write_table(table)
    (folder / ".hidden.txt").write_text("no")
    (folder / ".git").mkdir()
    (folder / ".git/no.txt").write_text("no")
    (folder / "note.md").write_text("no")
    return folder


@pytest.fixture
def remote(local: Path) -> Iterator[str]:
    """The same files in fsspec's store in memory."""
    memory = fsspec.filesystem("memory")
    memory.store.clear()
    for file in local.rglob("*"):
        if file.is_file():
            memory.pipe(f"/bucket/{file.relative_to(local)}", file.read_bytes())
    yield "memory://bucket"
    memory.store.clear()


@pytest.mark.parametrize("pattern", ["", "/*.txt", "/**/*.jsonl", "/deep/*.parquet", "/[a-b].txt"])
def test_documents_are_those_of_the_same_files_here(local: Path, remote: str, pattern: str) -> None:
    here, there = find_corpus(f"{local}{pattern}"), find_corpus(f"{remote}{pattern}")
    assert [file.name for file in there.files] == [file.name for file in here.files]
    assert [*there.documents()] == [*here.documents()]
    assert there.num_bytes() == here.num_bytes()


def test_prepared_shards_have_the_same_bytes_and_are_prepared_once(
    local: Path, remote: str, tmp_path: Path
) -> None:
    places = [prepared_folder(data, str(tmp_path / "cache")) for data in (str(local), remote)]
    here, there = (Path(str(place)) for place in places)
    names = {file.name for file in here.glob("*.arrow")}
    assert names and names == {file.name for file in there.glob("*.arrow")}
    for name in names:
        assert (there / name).read_bytes() == (here / name).read_bytes()
    assert find_data(remote, str(tmp_path / "cache")).is_there()
    fsspec.filesystem("memory").pipe("/bucket/a.txt", b"other")
    assert not find_data(remote, str(tmp_path / "cache")).is_there(), "another text"


def test_conversations_are_packed_as_those_of_a_local_file(remote: str, tmp_path: Path) -> None:
    (tmp_path / "chat.jsonl").write_bytes(CHAT)
    fsspec.filesystem("memory").pipe("/bucket/chat.jsonl", CHAT)
    cache = str(tmp_path / "cache")
    here, there = (
        prepare_chats(source, cache, 16)
        for source in (str(tmp_path / "chat.jsonl"), f"{remote}/chat.jsonl")
    )
    assert here == there and (Path(there) / FILE).is_file(), "named by content"
    with pytest.raises(UserError, match="6 files; name one JSONL file"):
        find_chats(remote, cache, 16)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        ("memory://bucket/none.txt", r"none\.txt: has no \.txt, .* file"),
        ("memory://bucket/*.csv", "has no .txt"),
        ("nowhere://bucket/a.txt", r"cannot be listed \(Protocol not known: nowhere\)"),
        ("http://user:secret@host/a.txt", r"cannot be listed \(credentials belong in the env"),
    ],
)
def test_unreadable_url_is_one_line(remote: str, data: str, reason: str) -> None:
    with pytest.raises(UserError, match=reason) as raised:
        find_corpus(data)
    assert "\n" not in str(raised.value) and "secret" not in str(raised.value)


def test_line_that_is_not_json_is_named_by_its_url(remote: str) -> None:
    fsspec.filesystem("memory").pipe("/bucket/bad.jsonl", b'{"text": "a"}\nno\n')
    with pytest.raises(UserError, match=r"^memory://bucket/bad\.jsonl, line 2: not JSON"):
        list(find_corpus(f"{remote}/bad.jsonl").documents())


def test_file_that_changes_while_it_is_read_is_refused(remote: str) -> None:
    [file] = remote_files(f"{remote}/a.txt")
    fsspec.filesystem("memory").pipe("/bucket/a.txt", b"shorter")
    with pytest.raises(OSError, match="has 7 bytes now, but was listed with 450"):
        file.read_bytes()


def test_rows_at_a_url_are_those_of_the_same_files_here(
    local: Path, remote: str, tmp_path: Path
) -> None:
    """Each file is copied to the machine's cache once."""
    cache = CacheSettings(folder=str(tmp_path / "cache"))
    here, there = ArrowDataset(local), ArrowDataset(remote, cache=cache)
    again = pickle.loads(pickle.dumps(there))
    assert len(there) == len(here) == 14
    for number in (13, 0, 6, 7):
        assert there[number] == again[number] == here[number]
    assert len([f for f in (tmp_path / "cache").iterdir() if f.stat().st_size]) == 2
    with pytest.raises(UserError, match=r"memory://bucket/none: there is no \.parquet or \.arrow"):
        ArrowDataset("memory://bucket/none")
    full = CacheSettings(folder=str(tmp_path / "small"), max_bytes=100)
    with pytest.raises(UserError, match=r"d\.arrow: cannot be read \(.*raise cache\.max_bytes\)"):
        ArrowDataset(f"{remote}/d.arrow", cache=full)
