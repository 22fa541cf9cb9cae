"""The cache of a node: bounded, shared and intact, even if processes die or files are damaged."""

from __future__ import annotations

import fcntl
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path
from typing import BinaryIO

import pytest

from pipelines.data.cache import CacheKey, HeldFile, ShardCache
from pipelines.data.cache.shard_cache import DRAFT, ROOM

SIZE = 1000


def content_of(number: int) -> bytes:
    return bytes([number]) * SIZE


def key_of(number: int) -> CacheKey:
    return CacheKey(sha256(content_of(number)).hexdigest(), SIZE)


def writer_of(number: int) -> Callable[[BinaryIO], None]:
    return lambda out: out.write(content_of(number))


def fill(cache: ShardCache, number: int) -> None:
    assert cache.fill(key_of(number), writer_of(number)) == "filled"


def cached_numbers(cache: ShardCache) -> set[int]:
    """The numbers of the cached contents; fails on any other file."""
    files = {file.name for file in cache.folder.iterdir()} - {ROOM}
    numbers_by_checksum = {key_of(number).checksum: number for number in range(100)}
    return {numbers_by_checksum[name] for name in files}


def hold_intact(cache: ShardCache, number: int) -> HeldFile:
    held = cache.hold(key_of(number))
    assert held is not None and held.path.read_bytes() == content_of(number)
    return held


def test_lru_files_are_evicted_and_files_in_use_stay(tmp_path: Path) -> None:
    cache = ShardCache(tmp_path / "cache", 3 * SIZE)
    for number in range(3):
        fill(cache, number)
        time.sleep(0.01)
    in_use = hold_intact(cache, 1)
    hold_intact(cache, 0).release()
    fill(cache, 3)
    assert cached_numbers(cache) == {0, 1, 3}, "2 was used least recently"
    other_files = [hold_intact(cache, 0), hold_intact(cache, 3)]
    assert cache.fill(key_of(4), writer_of(4)) == "full"
    assert cached_numbers(cache) == {0, 1, 3}
    in_use.release()
    fill(cache, 4)
    assert cached_numbers(cache) == {0, 3, 4}
    for held in other_files:
        held.release()


def test_only_one_of_several_processes_writes_the_same_file(tmp_path: Path) -> None:
    num_written, other_fills = [0], threading.Semaphore(0)

    def write_slowly(out: BinaryIO) -> None:
        num_written[0] += 1
        for _ in range(5):
            assert other_fills.acquire(timeout=30.0)
        out.write(content_of(7))

    def fill_cache(cache: ShardCache) -> str:
        filled = cache.fill(key_of(7), write_slowly)
        other_fills.release()
        return filled

    caches = [ShardCache(tmp_path / "cache", 3 * SIZE) for _ in range(6)]
    with ThreadPoolExecutor(6) as pool:
        results = list(pool.map(fill_cache, caches))
    assert sorted(results) == ["busy"] * 5 + ["filled"] and num_written == [1]
    assert caches[0].fill(key_of(7), write_slowly) == "filled" and num_written == [1], (
        "the file is cached"
    )
    assert cached_numbers(caches[0]) == {7}


def test_interrupted_fetch_leaves_no_file(tmp_path: Path) -> None:
    cache = ShardCache(tmp_path / "cache", 3 * SIZE)

    def write_half_and_fail(out: BinaryIO) -> None:
        out.write(b"half")
        raise ConnectionError("gone")

    with pytest.raises(ConnectionError):
        cache.fill(key_of(1), write_half_and_fail)
    assert cached_numbers(cache) == set() and cache.hold(key_of(1)) is None


KILLED = """
import sys, time
from pathlib import Path
from pipelines.data.cache import CacheKey, ShardCache

def fetch(out):
    out.write(b"half")
    out.flush()
    print("writing", flush=True)
    time.sleep(60.0)

cache = ShardCache(Path(sys.argv[1]), int(sys.argv[2]))
held = cache.hold(CacheKey(sys.argv[3], 1000))
cache.fill(CacheKey(sys.argv[4], 1000), fetch)
"""


def test_killed_process_leaves_no_partial_file_and_no_lock(tmp_path: Path) -> None:
    cache = ShardCache(tmp_path / "cache", 2 * SIZE)
    fill(cache, 1)
    command = [sys.executable, "-c", KILLED, str(cache.folder), str(2 * SIZE)]
    victim = subprocess.Popen(
        [*command, key_of(1).checksum, key_of(2).checksum], stdout=subprocess.PIPE
    )
    assert victim.stdout is not None and victim.stdout.readline() == b"writing\n"
    assert cache.fill(key_of(2), writer_of(2)) == "busy"
    assert cache.fill(key_of(3), writer_of(3)) == "full", "a draft counts with its final size"
    victim.send_signal(signal.SIGKILL)
    victim.wait()
    assert cache.hold(key_of(2)) is None, "a partial file is not used"
    assert [file.name for file in cache.folder.iterdir() if file.suffix == DRAFT]
    fill(cache, 3)
    assert cached_numbers(cache) == {1, 3}, "the draft is evicted before complete files"
    fill(cache, 2)
    assert cached_numbers(cache) == {3, 2}


def test_damaged_file_is_detected_and_replaced(tmp_path: Path) -> None:
    cache = ShardCache(tmp_path / "cache", 3 * SIZE)
    fill(cache, 1)
    path = cache.folder / key_of(1).checksum
    path.write_bytes(b"x" * SIZE)
    held = cache.hold(key_of(1))
    assert held is not None and not held.is_intact(key_of(1))
    cache.discard(held)
    assert cached_numbers(cache) == set()
    fill(cache, 1)
    cache.discard(held)  # a second process that saw the damaged file must not remove the new one
    held.release()
    assert hold_intact(cache, 1).is_intact(key_of(1))
    path.write_bytes(b"short")
    assert cache.hold(key_of(1)) is None
    fill(cache, 1)
    hold_intact(cache, 1).release()


def test_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(OSError):
        ShardCache(tmp_path / "link", SIZE)
    (tmp_path / "file").touch()
    with pytest.raises(OSError):
        ShardCache(tmp_path / "file", SIZE)
    assert ShardCache(tmp_path / "mine", SIZE).folder.stat().st_mode & 0o777 == 0o700


def test_concurrent_use_keeps_the_size_bound(tmp_path: Path) -> None:
    """Threads fill, use and release shared files while another thread measures the folder."""
    folder, max_bytes = tmp_path / "cache", 5 * SIZE
    ShardCache(folder, max_bytes)
    sizes, is_over = [], threading.Event()

    def work(number: int) -> None:
        cache = ShardCache(folder, max_bytes)
        for turn in range(40):
            number_in_use = (number * 3 + turn * 7) % 12
            cache.fill(key_of(number_in_use), writer_of(number_in_use))
            held = cache.hold(key_of(number_in_use))
            if held is not None:
                assert held.is_intact(key_of(number_in_use))
                held.release()

    def measure_sizes() -> None:
        while not is_over.wait(0.001):
            with (folder / ROOM).open("ab") as room:
                fcntl.flock(room, fcntl.LOCK_EX)
                files = list(folder.iterdir())
                sizes.append(sum(file.stat().st_size for file in files if file.exists()))

    watcher = threading.Thread(target=measure_sizes)
    watcher.start()
    try:
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(work, range(4)))
    finally:
        is_over.set()
        watcher.join()
    assert sizes and max(sizes) <= max_bytes
