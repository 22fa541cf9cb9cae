"""Text on a real S3 server is prepared as text on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from s3 import S3Proxy, start_s3_with_credentials

from actors.storage.storage import open_storage
from pipelines.data.corpus import find_corpus
from pipelines.data.opening import find_data, prepared_folder
from pipelines.data.shards import INDEX

TEXTS = {"a.txt": b"one text " * 40, "deep/b.jsonl": b'{"text": "two"}\n{"text": "three"}\n'}


@pytest.fixture(scope="module")
def texts() -> Iterator[str]:
    with start_s3_with_credentials() as proxy:
        yield uploaded(proxy)


def uploaded(proxy: S3Proxy) -> str:
    url = proxy.url_of("texts")
    for name, content in TEXTS.items():
        open_storage(url).write(name, content)
    return url


def test_text_on_s3_is_prepared_as_local_text(texts: str, tmp_path: Path) -> None:
    for name, content in TEXTS.items():
        (file := tmp_path / "texts" / name).parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
    here = find_corpus(str(tmp_path / "texts"))
    assert [*find_corpus(texts).documents()] == [*here.documents()]
    only_lines = texts.replace("/texts?", "/texts/**/*.jsonl?")
    assert [*find_corpus(only_lines).documents()] == ["two", "three"]
    place = Path(str(prepared_folder(texts, str(tmp_path / "cache"))))
    assert (place / INDEX).is_file() and find_data(texts, str(tmp_path / "cache")).is_there()


def test_text_is_prepared_from_url_to_url_and_prepared_data_are_skipped(
    texts: str,
) -> None:
    place = texts.replace("/texts?", "/texts/prepared?")
    cache = texts.replace("/texts?", "/cache?")
    before = [str(file) for file in find_corpus(texts).files]
    made = prepared_folder(texts, cache)
    assert made is not None and open_storage(made).size(INDEX)
    for name in open_storage(made).files():
        open_storage(place).write(name, open_storage(made).read(name))
    assert find_data(place, cache).corpus is None, "prepared data are no text"
    assert [str(file) for file in find_corpus(texts).files] == before
