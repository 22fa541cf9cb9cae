"""MDS shards: samples by index, every encoding, compression, and damaged or hostile folders."""

from __future__ import annotations

import io
import json
import pickle
import struct
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from shard_writers import write_mds

from pipelines.custom_data import MdsDataset
from pipelines.errors import UserError
from pipelines.settings import CacheSettings

NUM_SAMPLES = 7
COLUMNS = {"number": ("int", 8), "name": ("str", None), "half": ("float16", 2)}


def encoded(number: int) -> dict[str, bytes]:
    name = f"nº {number}".encode() * number  # the first is empty
    return {
        "number": struct.pack("<q", -number),
        "name": name,
        "half": np.float16(number / 2).tobytes(),
    }


@pytest.fixture
def cache(tmp_path: Path) -> CacheSettings:
    return CacheSettings(folder=str(tmp_path / "cache"))


def write(folder: Path, compression: str | None = None) -> Path:
    """Shards of 3, 3 and 1 samples."""
    samples = [encoded(number) for number in range(NUM_SAMPLES)]
    return write_mds(folder, COLUMNS, samples, 3, compression)


@pytest.mark.parametrize("compression", [None, "zstd", "gz", "bz2", "br"])
@pytest.mark.parametrize("scheme", ["", "local://"])
def test_samples_have_the_order_of_the_shards(
    compression: str | None, scheme: str, tmp_path: Path, cache: CacheSettings
) -> None:
    folder = write(tmp_path / "data", compression)
    data = MdsDataset(f"{scheme}{folder}", cache=cache)
    again = pickle.loads(pickle.dumps(data))
    assert len(data) == len(again) == NUM_SAMPLES
    for index in (6, 0, 3, 2, 4, 1, 5):
        sample = data[index]
        assert sample == again[index]
        assert sample == {
            "number": -index,
            "name": f"nº {index}" * index,
            "half": np.float16(index / 2),
        }
        assert type(sample["number"]) is int and sample["half"].dtype == np.float16
    with pytest.raises(IndexError):
        data[NUM_SAMPLES]
    chosen = MdsDataset(folder, ["number"], lambda sample: sample["number"] * 2, cache=cache)
    assert [chosen[i] for i in range(NUM_SAMPLES)] == [-2 * i for i in range(NUM_SAMPLES)]


def array_bytes(value: np.ndarray, dtype: int | None, shape_kind: str | None) -> bytes:
    parts = [] if dtype is None else [bytes([dtype])]
    if shape_kind is not None:
        size = {"<u1": 0, "<u2": 1}[shape_kind]
        parts += [bytes([value.ndim << 2 | size]), np.array(value.shape, shape_kind).tobytes()]
    return b"".join([*parts, value.tobytes()])


def image_bytes(kind: str) -> bytes:
    Image.new("L", (4, 2), 255).save(out := io.BytesIO(), kind)
    return out.getvalue()


FLOATS = np.arange(6, dtype=np.float32).reshape(2, 3)
LONG = np.arange(300, dtype=np.int64)
VALUES: list[tuple[str, bytes, Any]] = [
    ("bytes", b"\0\1", b"\0\1"),
    ("json", b'{"a": null}', {"a": None}),
    ("str_int", b"123456789012345678901", 123456789012345678901),
    ("str_float", b"0.1", 0.1),
    ("str_decimal", b"0.10", Decimal("0.10")),
    ("uint8", b"\xff", 255),
    ("int32", struct.pack("<i", -5), -5),
    ("float64", struct.pack("<d", 0.1), 0.1),
    ("ndarray", array_bytes(FLOATS, 34, "<u1"), FLOATS),
    ("ndarray", array_bytes(LONG, 65, "<u2"), LONG),
    ("ndarray:float32", array_bytes(FLOATS, None, "<u1"), FLOATS),
    ("ndarray:float32:2,3", FLOATS.tobytes(), FLOATS),
    ("png", image_bytes("PNG"), np.full((2, 4), 255)),
    ("jpeg", image_bytes("JPEG"), np.full((2, 4), 255)),
    ("jpeg:90", image_bytes("JPEG"), np.full((2, 4), 255)),
    ("pil", struct.pack("<3I", 4, 2, 1) + b"L" + b"\7" * 8, np.full((2, 4), 7)),
]


@pytest.mark.parametrize(("encoding", "content", "value"), VALUES)
def test_values_are_decoded_by_their_encoding(
    encoding: str, content: bytes, value: Any, tmp_path: Path, cache: CacheSettings
) -> None:
    data = MdsDataset(
        write_mds(tmp_path / "data", {"x": (encoding, None)}, [{"x": content}], 1), cache=cache
    )
    found = data[0]["x"]
    if isinstance(value, np.ndarray):
        np.testing.assert_array_equal(np.asarray(found), value)
    else:
        assert found == value
    if isinstance(found, np.ndarray):
        assert found.flags.writeable and found.dtype == value.dtype


def test_pickles_are_refused_unless_they_are_allowed(tmp_path: Path, cache: CacheSettings) -> None:
    columns = {"x": ("pkl", None), "y": ("str", None)}
    folder = write_mds(tmp_path / "data", columns, [{"x": pickle.dumps({1}), "y": b"a"}], 1)
    with pytest.raises(UserError, match="the column 'x' is a pickle, which can run any code"):
        MdsDataset(folder, cache=cache)
    assert MdsDataset(folder, columns=["y"], cache=cache)[0] == {"y": "a"}
    assert MdsDataset(folder, allow_pickle=True, cache=cache)[0]["x"] == {1}


def edit(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        index = json.loads((folder / "index.json").read_text())
        change(index)
        (folder / "index.json").write_text(json.dumps(index))

    return apply


def first_shard(**changes: Any) -> Callable[[Path], None]:
    return edit(lambda index: index["shards"][0].update(changes))


def outside(folder: Path) -> None:
    edit(lambda index: index["shards"][1]["raw_data"].update(basename="../secret"))(folder)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda folder: (folder / "index.json").unlink(), "cannot be read .*name a folder of MDS"),
        (lambda folder: (folder / "index.json").write_text("{"), "not an index of MDS shards"),
        (outside, r"shards\.1\.raw_data\.basename: .*'\.\./secret' lies outside of the folder"),
        (first_shard(format="jsonl"), r"shards\.0\.format: .*'mds'"),
        (first_shard(version=3), r"shards\.0\.version"),
        (first_shard(column_sizes=[8]), "differ in length"),
        (first_shard(samples=-1), r"shards\.0\.samples"),
        (first_shard(column_encodings=["int", "str", "complex"]), "encoding 'complex', which is"),
        (first_shard(compression="zstd", zip_data=None), "a compressed shard has no zip_data"),
        (edit(lambda index: index["shards"].clear()), "has no samples"),
    ],
)
def test_index_that_cannot_be_used_is_one_line(
    damage: Callable[[Path], None], reason: str, tmp_path: Path, cache: CacheSettings
) -> None:
    damage(folder := write(tmp_path / "data"))
    with pytest.raises(UserError, match=reason) as raised:
        MdsDataset(folder, cache=cache)
    message = str(raised.value)
    assert message.startswith(f"{folder}/index.json: ") and "\n" not in message


def overwrite(offset: int, content: bytes) -> Callable[[Path], None]:
    def apply(file: Path) -> None:
        data = bytearray(file.read_bytes())
        data[offset : offset + len(content)] = content
        file.write_bytes(data)

    return apply


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda file: file.write_bytes(file.read_bytes()[:-1]), r"it has \d+ bytes, \d+ in index"),
        (lambda file: file.write_bytes(b""), "it has 0 bytes"),
        (lambda file: file.unlink(), "cannot be read .*No such file"),
        (overwrite(0, b"\4"), "it has 4 samples, 3 in index"),
        (overwrite(4, b"\0"), "sample 0 lies at bytes"),
        (overwrite(8, b"\xff\xff"), "sample 0 lies at bytes"),
        (overwrite(8, b"\0\0"), "sample 0 lies at bytes"),
    ],
)
def test_damaged_shard_is_one_line(
    damage: Callable[[Path], None], reason: str, tmp_path: Path, cache: CacheSettings
) -> None:
    folder = write(tmp_path / "data")
    damage(folder / "shard.00000.mds")
    data = MdsDataset(folder, cache=cache)
    with pytest.raises(UserError, match=reason) as raised:
        data[0]
    message = str(raised.value)
    assert message.startswith(f"{folder}/shard.00000.mds: ") and "\n" not in message
    assert data[5]["number"] == -5


def test_sample_with_wrong_sizes_is_one_line(tmp_path: Path, cache: CacheSettings) -> None:
    folder = write(tmp_path / "data")
    file = folder / "shard.00000.mds"
    [begin] = struct.unpack_from("<I", file.read_bytes(), 8)
    overwrite(begin, b"\xff")(file)
    with pytest.raises(UserError, match=r"is damaged \(it has \d+ bytes, but its columns \d+\)"):
        MdsDataset(folder, cache=cache)[1]


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (overwrite(6, b"\xff\xff\xff"), "its sha1 is another|cannot be decompressed"),
        (lambda file: file.write_bytes(file.read_bytes()[:-2]), r"has \d+ bytes, \d+ in index"),
    ],
)
@pytest.mark.parametrize("compression", [None, "zstd"])
def test_damaged_shard_at_a_url_is_refused_at_once_and_not_kept(
    compression: str | None,
    damage: Callable[[Path], None],
    reason: str,
    tmp_path: Path,
    cache: CacheSettings,
) -> None:
    folder = write(tmp_path / "data", compression)
    [file] = folder.glob("shard.00000.*")
    whole = file.read_bytes()
    damage(file)
    with pytest.raises(UserError, match=reason) as raised:
        MdsDataset(f"local://{folder}", cache=cache)[0]
    assert "\n" not in str(raised.value)
    file.write_bytes(whole)
    assert MdsDataset(f"local://{folder}", cache=cache)[1]["number"] == -1


@pytest.mark.parametrize("compression", ["zstd", "gz", "bz2"])
def test_compressed_shard_does_not_become_larger_than_its_index_says(
    compression: str, tmp_path: Path, cache: CacheSettings
) -> None:
    folder = write(tmp_path / "data", compression)
    edit(lambda index: index["shards"][0]["raw_data"].update(bytes=10))(folder)
    with pytest.raises(UserError, match=r"cannot be decompressed|has 11 bytes, 10 in index"):
        MdsDataset(folder, cache=cache)[0]
