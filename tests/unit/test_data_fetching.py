"""Fetching: requested files come first, then prefetched ones, within the bound on unread bytes."""

from __future__ import annotations

import threading
from pathlib import Path
from shutil import rmtree

import pytest

from actors.storage.storage import DiskStorage
from pipelines.data import prepare
from pipelines.data.cache.shard_cache import ROOM
from pipelines.data.corpus import find_corpus
from pipelines.data.fetching import FetchedShards, Queue
from pipelines.data.prepared import Prepared
from pipelines.data.shards import INDEX, read_index
from pipelines.data.tokens import find_tokenizer
from pipelines.data.windows import Windows
from pipelines.errors import DataUnreachable, UserError
from pipelines.settings import CacheSettings


class Store(DiskStorage):
    """A folder as an object store that can fail and records the names that are read."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.read_names: list[str] = []
        self.error: OSError | None = None
        self.refused = threading.Event()

    def read(self, name: str, offset: int = 0, max_bytes: int | None = None) -> bytes:
        if self.error is not None:
            self.refused.set()
            raise self.error
        self.read_names.append(name)
        return super().read(name, offset, max_bytes)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    (tmp_path / "a.txt").write_text("".join(f"{number} " for number in range(3000)))
    prepare(find_corpus(str(tmp_path / "a.txt")), tmp_path / "out", find_tokenizer(), 0, 1000)
    return Store(tmp_path / "out")


def open_far(store: Store, cache: Path, **changes: float) -> Windows:
    settings = CacheSettings(folder=str(cache), **changes)
    shards = FetchedShards(store, settings)
    return Windows(Prepared("there", read_index(store), shards), "train", 100)


def are_equal(samples: Windows, store: Store) -> bool:
    local, ids = Windows(store.path, "train", 100), range(samples.num_samples)
    return all(a.equal(b) for a, b in zip(samples.read(ids), local.read(ids), strict=True))


def test_fetched_windows_equal_those_of_the_folder(store: Store, tmp_path: Path) -> None:
    samples = open_far(store, tmp_path / "cache")
    assert samples.is_far and store.read_names == [INDEX], "no shard is read before a request"
    assert are_equal(samples, store)
    assert len(store.read_names) == len(set(store.read_names)) > 10


def test_file_damaged_in_the_store_is_named(store: Store, tmp_path: Path) -> None:
    samples = open_far(store, tmp_path / "cache")
    shard = store.path / "train-tokens-00002.arrow"
    content = shard.read_bytes()
    shard.write_bytes(content[:-500] + b"?" + content[-499:])
    with pytest.raises(UserError, match=r"train-tokens-00002\.arrow: is damaged"):
        samples.read(range(samples.num_samples))
    shard.unlink()
    with pytest.raises(UserError, match=r"train-tokens-00002\.arrow: does not exist any more"):
        open_far(store, tmp_path / "other").read(range(samples.num_samples))


def test_unreachable_store_fails_after_patience_s(store: Store, tmp_path: Path) -> None:
    samples = open_far(store, tmp_path / "cache", patience_s=1.0)
    store.error = ConnectionRefusedError("no answer")
    with pytest.raises(DataUnreachable, match=r"cannot be read \(no answer\)"):
        samples.read([3])
    store.error = None
    assert are_equal(samples, store)


def test_waiting_reader_can_be_interrupted(store: Store, tmp_path: Path) -> None:
    samples = open_far(store, tmp_path / "cache")
    store.error = ConnectionRefusedError("no answer")

    def stop() -> None:
        if store.refused.is_set():
            raise InterruptedError

    with pytest.raises(InterruptedError):
        samples.fetch([3], stop)


def test_deleted_cache_is_created_again(store: Store, tmp_path: Path) -> None:
    samples = open_far(store, tmp_path / "cache")
    samples.read([0])
    rmtree(tmp_path / "cache")
    assert are_equal(samples, store)
    assert (tmp_path / "cache" / ROOM).exists()


def test_data_without_checksums_are_refused(store: Store, tmp_path: Path) -> None:
    index = read_index(store)
    splits_without_checksums = {
        name: split.model_copy(
            update={"tokens": tuple(f.model_copy(update={"checksum": ""}) for f in split.tokens)}
        )
        for name, split in index.splits.items()
    }
    prepared = Prepared(
        "there",
        index.model_copy(update={"splits": splits_without_checksums}),
        FetchedShards(store, CacheSettings(folder=str(tmp_path / "cache"))),
    )
    with pytest.raises(UserError, match=r"no checksum of it.* prepare the data again"):
        Windows(prepared, "train", 100)


def test_cache_smaller_than_a_shard_is_refused(store: Store, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cache\.max_bytes=1000 is too small: .* allow more"):
        open_far(store, tmp_path / "cache", max_bytes=1000)


def test_unusable_cache_folder_is_reported(store: Store, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DataUnreachable, match=r"cache\.folder=.*file/cache: cannot be used"):
        open_far(store, tmp_path / "file" / "cache").reach()


def test_requested_files_precede_prefetched_files_which_are_bounded() -> None:
    queue = Queue(max_ahead_bytes=20)
    queue.ahead = {"a": 10, "b": 10, "c": 10}
    assert queue.take(0.0, ()) == "a"
    queue.needed.append("c")
    assert queue.take(0.0, ()) == "c"
    assert queue.take(0.0, ()) == "b"
    for name in "ab":
        queue.mark_fetched(name)
        queue.under_way.discard(name)
    queue.needed.remove("c")
    queue.under_way.discard("c")
    assert queue.take(0.0, ()) is None, "the bound on unread bytes is reached"
    queue.mark_read("a")
    assert queue.take(0.0, ()) == "c"
    queue.mark_fetched("c")
    queue.mark_read("elsewhere")
    assert not queue.unread, "a reader of another file does not follow the plan any more"
    queue.needed.append("z")
    queue.not_before["z"] = 5.0
    assert (queue.take(1.0, ()), queue.take(5.0, {"z"}), queue.take(5.0, ())) == (None, None, "z")
