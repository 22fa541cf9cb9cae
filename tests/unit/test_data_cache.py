"""The cache of a machine: bounded, shared, whole, whoever dies or spoils a file."""

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

from pipelines.data.cache import DRAFT, ROOM, HeldFile, ShardCache, Wanted

SIZE = 1000


def content(number: int) -> bytes:
    return bytes([number]) * SIZE


def wanted(number: int) -> Wanted:
    return Wanted(sha256(content(number)).hexdigest(), SIZE)


def write(number: int) -> Callable[[BinaryIO], None]:
    return lambda out: out.write(content(number))


def put(cache: ShardCache, number: int) -> None:
    assert cache.fill(wanted(number), write(number)) == "filled"


def kept(cache: ShardCache) -> set[int]:
    """Which of the contents are there, and nothing else is."""
    files = {file.name for file in cache.folder.iterdir()} - {ROOM}
    known = {wanted(number).checksum: number for number in range(100)}
    return {known[name] for name in files}


def use(cache: ShardCache, number: int) -> HeldFile:
    held = cache.hold(wanted(number))
    assert held is not None and held.path.read_bytes() == content(number)
    return held


def test_the_least_recently_used_go_and_what_is_in_use_stays(tmp_path: Path) -> None:
    cache = ShardCache(tmp_path / "cache", 3 * SIZE)
    for number in range(3):
        put(cache, number)
        time.sleep(0.01)
    in_use = use(cache, 1)
    use(cache, 0).let_go()
    put(cache, 3)
    assert kept(cache) == {0, 1, 3}, "2 has not been used for longest"
    others = [use(cache, 0), use(cache, 3)]
    assert cache.fill(wanted(4), write(4)) == "no room"
    assert kept(cache) == {0, 1, 3}
    in_use.let_go()
    put(cache, 4)
    assert kept(cache) == {0, 3, 4}
    for held in others:
        held.let_go()


def test_of_many_who_want_the_same_one_writes_it(tmp_path: Path) -> None:
    num_written, others = [0], threading.Semaphore(0)

    def slowly(out: BinaryIO) -> None:
        num_written[0] += 1
        for _ in range(5):
            assert others.acquire(timeout=30.0)
        out.write(content(7))

    def want(cache: ShardCache) -> str:
        filled = cache.fill(wanted(7), slowly)
        others.release()
        return filled

    caches = [ShardCache(tmp_path / "cache", 3 * SIZE) for _ in range(6)]
    with ThreadPoolExecutor(6) as pool:
        told = list(pool.map(want, caches))
    assert sorted(told) == ["busy"] * 5 + ["filled"] and num_written == [1]
    assert caches[0].fill(wanted(7), slowly) == "filled" and num_written == [1], "it is there"
    assert kept(caches[0]) == {7}


def test_what_breaks_off_leaves_nothing(tmp_path: Path) -> None:
    cache = ShardCache(tmp_path / "cache", 3 * SIZE)

    def breaks(out: BinaryIO) -> None:
        out.write(b"half")
        raise ConnectionError("gone")

    with pytest.raises(ConnectionError):
        cache.fill(wanted(1), breaks)
    assert kept(cache) == set() and cache.hold(wanted(1)) is None


KILLED = """
import sys, time
from pathlib import Path
from pipelines.data.cache import ShardCache, Wanted

def fetch(out):
    out.write(b"half")
    out.flush()
    print("writing", flush=True)
    time.sleep(60.0)

cache = ShardCache(Path(sys.argv[1]), int(sys.argv[2]))
held = cache.hold(Wanted(sys.argv[3], 1000))
cache.fill(Wanted(sys.argv[4], 1000), fetch)
"""


def test_who_is_killed_leaves_nothing_half_written_and_nothing_locked(tmp_path: Path) -> None:
    cache = ShardCache(tmp_path / "cache", 2 * SIZE)
    put(cache, 1)
    command = [sys.executable, "-c", KILLED, str(cache.folder), str(2 * SIZE)]
    victim = subprocess.Popen(
        [*command, wanted(1).checksum, wanted(2).checksum], stdout=subprocess.PIPE
    )
    assert victim.stdout is not None and victim.stdout.readline() == b"writing\n"
    assert cache.fill(wanted(2), write(2)) == "busy"
    assert cache.fill(wanted(3), write(3)) == "no room", "a draft counts as what it will be"
    victim.send_signal(signal.SIGKILL)
    victim.wait()
    assert cache.hold(wanted(2)) is None, "half a file is none"
    assert [file.name for file in cache.folder.iterdir() if file.suffix == DRAFT]
    put(cache, 3)
    assert kept(cache) == {1, 3}, "the draft went, before what is whole"
    put(cache, 2)
    assert kept(cache) == {3, 2}


def test_a_damaged_file_is_seen_and_replaced(tmp_path: Path) -> None:
    cache = ShardCache(tmp_path / "cache", 3 * SIZE)
    put(cache, 1)
    path = cache.folder / wanted(1).checksum
    path.write_bytes(b"x" * SIZE)
    held = cache.hold(wanted(1))
    assert held is not None and not held.is_what(wanted(1))
    cache.discard(held)
    assert kept(cache) == set()
    put(cache, 1)
    cache.discard(held)  # by another, who saw the damaged one: this is not it any more
    held.let_go()
    assert use(cache, 1).is_what(wanted(1))
    path.write_bytes(b"short")
    assert cache.hold(wanted(1)) is None
    put(cache, 1)
    use(cache, 1).let_go()


def test_a_folder_of_somebody_else_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(OSError):
        ShardCache(tmp_path / "link", SIZE)
    (tmp_path / "file").touch()
    with pytest.raises(OSError):
        ShardCache(tmp_path / "file", SIZE)
    assert ShardCache(tmp_path / "mine", SIZE).folder.stat().st_mode & 0o777 == 0o700


def test_many_at_once_keep_the_bound(tmp_path: Path) -> None:
    """Each fills, uses and lets go of files of its own and of others; seen from outside, too."""
    folder, most = tmp_path / "cache", 5 * SIZE
    ShardCache(folder, most)
    sizes, is_over = [], threading.Event()

    def work(number: int) -> None:
        cache = ShardCache(folder, most)
        for turn in range(40):
            one = (number * 3 + turn * 7) % 12
            cache.fill(wanted(one), write(one))
            held = cache.hold(wanted(one))
            if held is not None:
                assert held.is_what(wanted(one))
                held.let_go()

    def look() -> None:
        while not is_over.wait(0.001):
            with (folder / ROOM).open("ab") as room:
                fcntl.flock(room, fcntl.LOCK_EX)
                there = list(folder.iterdir())
                sizes.append(sum(file.stat().st_size for file in there if file.exists()))

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(work, range(4)))
    finally:
        is_over.set()
        watcher.join()
    assert sizes and max(sizes) <= most
