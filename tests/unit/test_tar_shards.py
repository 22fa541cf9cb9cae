"""Tar shards: samples by index as WebDataset groups and decodes them, and hostile tar files."""

from __future__ import annotations

import gzip
import io
import pickle
import sys
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from shard_writers import write_tar
from torch import nn

from pipelines.custom_data import TarDataset
from pipelines.custom_data.sample_shards.images import pillow
from pipelines.custom_data.sample_shards.tar_index import TarIndex, index_tar
from pipelines.data.cache.shard_cache import ROOM
from pipelines.data.cache.shared_indexes import INDEXES
from pipelines.data.source_files import expand_braces
from pipelines.errors import UserError
from pipelines.run.plan import TrainRequest, make_plan, store_recipe
from pipelines.run.program import TrainingProgram
from pipelines.settings import CacheSettings, TrainSettings
from pipelines.settings.recipe import Recipe


def saved(write: Callable[[io.BytesIO], object]) -> bytes:
    write(out := io.BytesIO())
    return out.getvalue()


PIXELS = np.arange(12, dtype=np.uint8).reshape(2, 2, 3)
FIELDS = {
    "png": saved(lambda out: Image.fromarray(PIXELS).save(out, "PNG")),
    "json": b'{"a": [1, 2]}',
    "txt": "schön".encode(),
    "cls": b"3\n",
    "npy": saved(lambda out: np.save(out, np.arange(3))),
    "pth": saved(lambda out: torch.save({"w": torch.ones(2)}, out)),
    "meta.json.gz": gzip.compress(b'{"b": 1}'),
    "bin": b"\0\1",
}


@pytest.fixture
def cache(tmp_path: Path) -> CacheSettings:
    return CacheSettings(folder=str(tmp_path / "cache"))


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """Three files of two, none and three samples."""
    counts = (range(2), range(0), range(2, 5))
    for number, samples in enumerate(counts):
        members = [
            (f"set/{sample:03d}.{field}", content)
            for sample in samples
            for field, content in (("CLS", b"%d" % sample), ("a.txt", b"text %d" % sample))
        ]
        write_tar(tmp_path / f"part-{number:04d}.tar", [("__meta__/x.txt", b""), *members])
    return tmp_path


def test_samples_have_the_order_of_files_and_members(shards: Path, cache: CacheSettings) -> None:
    data = TarDataset(f"{shards}/part-{{0000..0002}}.tar", cache=cache)
    assert len(data) == 5
    keys = ["cls", "a.txt"]
    assert [(data[i]["cls"], data[i]["a.txt"]) for i in range(5)] == [
        (i, f"text {i}") for i in range(5)
    ]
    first = {"__key__": "set/002", "__url__": f"{shards}/part-0002.tar"}
    assert data[2] == {**first, "cls": 2, "a.txt": "text 2"} and list(data[2])[2:] == keys
    with pytest.raises(IndexError):
        data[5]
    again = pickle.loads(pickle.dumps(data))
    assert len(again) == 5 and again[4] == data[4]
    for same in (shards, f"{shards}/*.tar", sorted(shards.glob("*.tar"))):
        assert TarDataset(same, cache=cache)[3] == data[3]
    turned = TarDataset([shards / "part-0002.tar", shards / "part-0000.tar"], cache=cache)
    assert [turned[i]["cls"] for i in range(5)] == [2, 3, 4, 0, 1]


def test_fields_are_decoded_by_their_names(tmp_path: Path, cache: CacheSettings) -> None:
    path = write_tar(tmp_path / "a.tar", [(f"x.{name}", data) for name, data in FIELDS.items()])
    sample = TarDataset(path, cache=cache)[0]
    np.testing.assert_array_equal(np.asarray(sample["png"]), PIXELS)
    assert sample["png"].mode == "RGB"
    assert (sample["json"], sample["txt"], sample["cls"]) == ({"a": [1, 2]}, "schön", 3)
    np.testing.assert_array_equal(sample["npy"], [0, 1, 2])
    assert torch.equal(sample["pth"]["w"], torch.ones(2))
    assert sample["meta.json.gz"] == {"b": 1} and sample["bin"] == b"\0\1"
    chosen = TarDataset(
        path,
        fields=["cls", "png"],
        decoders={"png": len, "cls": float},
        transform=lambda sample: (sample["png"], sample["cls"], len(sample)),
        cache=cache,
    )
    assert chosen[0] == (len(FIELDS["png"]), 3.0, 4)


def test_pickles_are_refused_unless_they_are_allowed(tmp_path: Path, cache: CacheSettings) -> None:
    touched = tmp_path / "touched"
    hostile = b"cpathlib\nPath.touch\n(cpathlib\nPath\n(V%b\ntRtR." % str(touched).encode()
    path = write_tar(tmp_path / "a.tar", [("x.pkl", hostile), ("x.cls", b"1")])
    with pytest.raises(UserError, match="'pkl' is a pickle, which can run any code"):
        TarDataset(path, cache=cache)
    assert TarDataset(path, fields=["cls"], cache=cache)[0]["cls"] == 1
    weights = write_tar(tmp_path / "b.tar", [("x.pth", hostile)])
    with pytest.raises(UserError, match=r"b\.tar, sample 'x', field 'pth': cannot be decoded"):
        TarDataset(weights, cache=cache)[0]
    array = saved(lambda out: np.save(out, np.array([Path()], object), allow_pickle=True))
    objects = write_tar(tmp_path / "c.tar", [("x.npy", array)])
    with pytest.raises(UserError, match=r"field 'npy': cannot be decoded .*allow_pickle=False"):
        TarDataset(objects, cache=cache)[0]
    assert not touched.exists()
    allowed = write_tar(tmp_path / "d.tar", [("x.pyd", pickle.dumps({1, 2}))])
    assert TarDataset(allowed, allow_pickle=True, cache=cache)[0]["pyd"] == {1, 2}


def test_images_stay_bytes_without_pillow_and_a_line_says_so(
    tmp_path: Path,
    cache: CacheSettings,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = write_tar(tmp_path / "a.tar", [("x.png", FIELDS["png"]), ("y.png", FIELDS["png"])])
    data = TarDataset(path, cache=cache)
    pillow.cache_clear()
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "PIL.Image", None)  # as if it were not installed
        assert [data[i]["png"] for i in range(2)] == [FIELDS["png"]] * 2
    pillow.cache_clear()
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("elastic: Pillow is not installed: images stay bytes")


def link(kind: bytes, target: str) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        with tarfile.open(path, "w") as tar:
            member = tarfile.TarInfo("a.txt")
            member.type, member.linkname = kind, target
            tar.addfile(member)

    return write


def named(*names: str) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        write_tar(path, [(name, b"1") for name in names])

    return write


def cut(num_bytes: int) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        write_tar(path, [("a.txt", b"x" * 700), ("b.txt", b"y" * 700)])
        path.write_bytes(path.read_bytes()[:num_bytes])

    return write


def changed(offset: int, content: bytes) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        write_tar(path, [("a.txt", b"x" * 700), ("b.txt", b"y" * 700)])
        data = bytearray(path.read_bytes())
        data[offset : offset + len(content)] = content
        path.write_bytes(data)

    return write


def with_size(size: int, kind: bytes = tarfile.REGTYPE) -> Callable[[Path], None]:
    """A header with a right checksum that claims another size."""

    def write(path: Path) -> None:
        member = tarfile.TarInfo("a.txt")
        member.size, member.type = size, kind
        path.write_bytes(member.tobuf(tarfile.GNU_FORMAT) + bytes(10240))

    return write


@pytest.mark.parametrize(
    ("write", "reason"),
    [
        (named("../../outside.txt"), "'../../outside.txt' has a name outside of the archive"),
        (named("a/../../b.txt"), "has a name outside"),
        (link(tarfile.SYMTYPE, "/etc/passwd"), "is a link to '/etc/passwd'"),
        (link(tarfile.LNKTYPE, "b.txt"), "is a link to 'b.txt'"),
        (link(tarfile.CHRTYPE, ""), "is no plain file"),
        (named("a.txt", "b.txt", "a.cls"), "'a.cls' is apart from the other files of 'a'"),
        (named("a.txt", "a.TXT"), "is a second field 'txt' of 'a'"),
        (named("README", "folder/.hidden.txt"), "has no samples"),
        (cut(600), "'a.txt' ends at byte 1212 of 600"),
        (cut(1536), "has been cut off at byte 1536"),
        (cut(1536 + 100), "damaged header at byte 1536|has been cut off"),
        (cut(0), "cannot be read as tar"),
        (changed(1536 + 10, b"damage"), "has a damaged header at byte 1536"),
        (changed(0, b"\x1f\x8b"), "is compressed with gzip"),
        (with_size(-1024), "ends at byte -512|cannot be read as tar"),
        (with_size(1 << 50), "ends at byte"),
        (with_size(1 << 40, tarfile.GNUTYPE_LONGNAME), "cannot be read as tar .a header of"),
        (with_size(-512, tarfile.XHDTYPE), "cannot be read as tar"),
    ],
)
def test_hostile_or_damaged_tar_is_refused_in_one_line(
    write: Callable[[Path], None], reason: str, tmp_path: Path, cache: CacheSettings
) -> None:
    (folder := tmp_path / "in").mkdir()
    write(folder / "a.tar")
    before = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    with pytest.raises(UserError, match=reason) as raised:
        TarDataset(folder / "a.tar", cache=cache)
    assert str(raised.value).startswith(f"{folder}/a.tar: ") and "\n" not in str(raised.value)
    after = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    added = {
        file for file in after.keys() - before.keys() if file.parent != Path(str(cache.folder))
    }
    assert not added and not (tmp_path / "outside.txt").exists()


def test_chain_of_long_names_is_refused_and_not_followed(tmp_path: Path) -> None:
    header = tarfile.TarInfo("a")
    header.size, header.type = 1, tarfile.GNUTYPE_LONGNAME
    block = header.tobuf(tarfile.GNU_FORMAT) + b"a".ljust(512, b"\0")
    (tmp_path / "a.tar").write_bytes(block * 3000)
    with pytest.raises(UserError, match="cannot be read as tar") as raised:
        index_tar(tmp_path / "a.tar", "a.tar")
    assert "\n" not in str(raised.value)


def test_index_is_kept_until_the_file_changes(
    shards: Path, cache: CacheSettings, capsys: pytest.CaptureFixture[str]
) -> None:
    one = shards / "part-0000.tar"

    def kept() -> dict[Path, int]:
        files = Path(str(cache.folder)).iterdir()
        return {file: file.stat().st_ino for file in files if file.name != ROOM}

    TarDataset(one, cache=cache)
    [(file, inode)] = kept().items()
    assert vars(TarIndex.from_bytes(file.read_bytes())).keys() == vars(index_tar(one, "")).keys()
    opened = TarDataset(one, cache=cache)
    assert kept() == {file: inode}, "read, not made again"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 255
    file.write_bytes(content)
    assert TarDataset(one, cache=cache)[1]["cls"] == 1
    assert "its kept index cannot be read" in capsys.readouterr().err
    write_tar(one, [("new.cls", b"7")])
    with pytest.raises(UserError, match=r"part-0000\.tar: has changed since the run opened it"):
        opened[0]
    assert TarDataset(one, cache=cache)[0]["cls"] == 7


def test_files_at_urls_are_copied_again_when_they_have_been_evicted(
    shards: Path, tmp_path: Path
) -> None:
    """The cache has room for one tar file of 10 kB and the indexes."""
    small = CacheSettings(folder=str(tmp_path / "cache"), max_bytes=18_000, num_fetchers=1)
    data = TarDataset(f"local://{shards}/part-000{{0,2}}.tar", cache=small)
    for _ in range(2):
        assert [data[i]["cls"] for i in range(5)] == list(range(5))
    sizes = [file.stat().st_size for file in (tmp_path / "cache").iterdir()]
    assert sum(sizes) <= small.max_bytes and sizes.count(10240) == 1


@pytest.fixture
def run_folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "run"
    INDEXES.use(None)


def test_start_of_a_run_publishes_indexes_so_that_its_workers_need_not_copy_all_files(
    shards: Path, run_folder: Path, tmp_path: Path
) -> None:
    def open_data(machine: str) -> TarDataset:
        cache = CacheSettings(folder=str(tmp_path / machine))
        return TarDataset(f"local://{shards}/part-000{{0..2}}.tar", transform=of_row, cache=cache)

    settings = TrainSettings(batch=2, microbatch=1, steps=1)
    recipe = Recipe(
        model=lambda: nn.Linear(1, 1),
        loss=lambda model, batch: model(batch).square().mean(),
        optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
        data=partial(open_data, "first"),
    )
    plan = make_plan(
        TrainRequest(replace(recipe, settings=settings), storage=str(tmp_path), run_name="run"), 0
    )
    assert not run_folder.exists(), "a plan writes nothing"
    store_recipe(plan)
    assert list((run_folder / "stream" / "indexes").glob("*.pack"))
    program = TrainingProgram(**plan.run.program.kwargs)
    program.warm_up()
    data = open_data("second")
    sizes = [file.stat().st_size for file in (tmp_path / "second").iterdir()]
    assert len(sizes) == 2 and 10240 not in sizes, "a pack and the lock"
    assert [float(data[i]) for i in range(5)] == [0, 1, 2, 3, 4]


def of_row(sample: dict[str, Any]) -> torch.Tensor:
    return torch.tensor([float(sample["cls"])])


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"paths": "pipe:curl http://host/a.tar"}, "names a command"),
        ({"paths": "a.tar::b.tar"}, "several URLs"),
        ({"paths": "none-{00..01}.tar"}, r"none-00\.tar: there is no \.tar file"),
        ({"paths": []}, "an empty list of files"),
        ({"fields": ["jpg"]}, "sample 'set/000' has no field 'jpg', only cls, a.txt"),
    ],
)
def test_what_cannot_be_opened_is_one_line(
    changes: dict[str, Any], reason: str, shards: Path, cache: CacheSettings
) -> None:
    with pytest.raises(UserError, match=reason) as raised:
        TarDataset(**{"paths": shards, "cache": cache, **changes})
    assert "\n" not in str(raised.value)


def test_damaged_field_is_named(tmp_path: Path, cache: CacheSettings) -> None:
    path = write_tar(tmp_path / "a.tar", [("x.json", b"{"), ("y.png", b"no image")])
    data = TarDataset(path, cache=cache)
    for number, what in enumerate(("sample 'x', field 'json'", "sample 'y', field 'png'")):
        with pytest.raises(UserError, match=f"{what}: cannot be decoded") as raised:
            data[number]
        assert "\n" not in str(raised.value)


def test_braces_stand_for_names_as_in_a_shell() -> None:
    assert expand_braces("a{8..11}b") == ["a8b", "a9b", "a10b", "a11b"]
    assert expand_braces("{a,b}/{00..01}") == ["a/00", "a/01", "b/00", "b/01"]
    assert expand_braces("a{}b{x}") == ["a{}b{x}"]
    with pytest.raises(UserError, match="must count upwards"):
        expand_braces("a{5..1}")
    with pytest.raises(UserError, match="more than 1000000 files"):
        expand_braces("{0..99999}{0..99999}")
