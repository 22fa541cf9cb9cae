"""Damaged, foreign and missing shards: errors name them, and training never reads them."""

import json
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipelines.data import prepare
from pipelines.data.corpus import find_corpus
from pipelines.data.shards import INDEX
from pipelines.data.tokens import find_tokenizer
from pipelines.data.windows import Windows, verify
from pipelines.errors import UserError

SHARD = "train-tokens-00001.arrow"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "a.txt").write_text("some words of text\n" * 150)
    prepare(find_corpus(str(tmp_path / "a.txt")), tmp_path / "out", find_tokenizer(), 0, 1000)
    return tmp_path / "out"


def pad(shard: Path, num_bytes: int) -> None:
    with shard.open("ab") as file:
        file.truncate(num_bytes)


def write_foreign(shard: Path, schema: pa.Schema) -> None:
    """Write another Arrow file with exactly the size in the index."""
    num_bytes = shard.stat().st_size
    with pa.ipc.new_file(shard, schema) as writer:
        writer.write_table(pa.table({schema.names[0]: [1, 2, 3]}, schema=schema))
    pad(shard, num_bytes)


def remove_last_byte(shard: Path) -> None:
    pad(shard, shard.stat().st_size - 1)


def zero_the_footer(shard: Path) -> None:
    num_bytes = shard.stat().st_size
    pad(shard, num_bytes - 200)
    pad(shard, num_bytes)


def replace_with_other_column(shard: Path) -> None:
    """Write the shard of another column, with a matching index entry."""
    other = shard.with_name("train-starts-00000.arrow")
    shard.write_bytes(other.read_bytes())
    index = json.loads((shard.parent / INDEX).read_text())
    index["splits"]["train"]["tokens"][1]["num_bytes"] = other.stat().st_size
    (shard.parent / INDEX).write_text(json.dumps(index))


@pytest.mark.parametrize(
    "damage",
    [
        Path.unlink,
        remove_last_byte,
        zero_the_footer,
        replace_with_other_column,
        lambda shard: pad(shard, 0),
        lambda shard: shard.write_bytes(b"?" * shard.stat().st_size),
        lambda shard: write_foreign(shard, pa.schema([("token", pa.uint16())])),
        lambda shard: write_foreign(shard, pa.schema([("text", pa.int64())])),
    ],
)
def test_bad_shard_is_named_on_opening(folder: Path, damage: Callable[[Path], object]):
    Windows(folder, "train", 16)
    damage(folder / SHARD)
    with pytest.raises(UserError, match=f"{SHARD}: .*prepare the data again") as caught:
        Windows(folder, "train", 16)
    assert "\n" not in str(caught.value)


def test_verify_finds_one_changed_token(folder: Path):
    verify(folder)
    shard = folder / SHARD
    content = shard.read_bytes()
    offset = content.index("words".encode("utf-16-le"))
    shard.write_bytes(content[:offset] + b"W" + content[offset + 1 :])
    Windows(folder, "train", 16)
    with pytest.raises(UserError, match=SHARD):
        verify(folder)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 10**6), st.binary(min_size=1, max_size=4))
def test_randomly_damaged_shard_is_read_or_refused(folder: Path, offset: int, junk: bytes):
    """A shard with random bytes is opened or named: no other exception, no crash."""
    shard = folder / SHARD
    good = shard.read_bytes()
    offset %= len(good) - len(junk)
    shard.write_bytes(good[:offset] + junk + good[offset + len(junk) :])
    try:
        assert Windows(folder, "train", 16).read([70]).tokens.shape == (1, 16)
    except UserError as error:
        assert SHARD in str(error)
    finally:
        shard.write_bytes(good)


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", '{"format": "something else"}', '{"format": "elastic-tokens/1"}', None],
)
def test_bad_index_is_named(folder: Path, content: str | None):
    file = folder / INDEX
    if content is None:
        content = file.read_text().replace('"separator": 256', '"separator": 255')
    file.write_text(content)
    with pytest.raises(UserError, match=rf"{INDEX}: .*prepare the data") as caught:
        Windows(folder, "train", 16)
    assert "\n" not in str(caught.value)
