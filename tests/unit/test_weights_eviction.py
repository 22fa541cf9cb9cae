"""Copies of weights on a machine are bounded; those that a living process uses stay."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pipelines.data.cache import local_folder
from pipelines.data.cache.shard_cache import DRAFT
from pipelines.errors import DataUnreachable
from pipelines.settings import CacheSettings

SIZE = 1000
MAX_BYTES = 2 * SIZE
USER = """
import sys
from pipelines.data.cache import local_folder
from pipelines.settings import CacheSettings

settings = CacheSettings(folder=sys.argv[1], max_weights_bytes=int(sys.argv[2]))
for url in sys.stdin:
    local_folder(url.strip(), settings)
    print("used", flush=True)
"""


@pytest.fixture
def urls(tmp_path: Path) -> list[str]:
    """Four folders of one file each, read by fsspec."""
    for number in range(4):
        (folder := tmp_path / f"weights/{number}").mkdir(parents=True)
        (folder / "model.safetensors").write_bytes(bytes([number]) * SIZE)
    return [f"local://{tmp_path}/weights/{number}" for number in range(4)]


@contextmanager
def process_using(cache: Path, *urls: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", USER, str(cache), str(MAX_BYTES)]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
    assert process.stdin is not None and process.stdout is not None
    for url in urls:
        print(url, file=process.stdin, flush=True)
        assert process.stdout.readline() == "used\n"
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def copied(cache: Path) -> set[int]:
    copies = cache.with_name(f"{cache.name}-folders").glob("*/model.safetensors")
    return {file.read_bytes()[0] for file in copies}


def test_least_recently_used_weights_make_room_unless_a_living_process_uses_them(
    urls: list[str], tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    settings = CacheSettings(folder=str(cache), max_weights_bytes=MAX_BYTES)
    with process_using(cache, urls[0], urls[1], urls[0]) as process:
        assert copied(cache) == {0, 1}
        with pytest.raises(DataUnreachable, match=r"no room for 1000 bytes.*max_weights_bytes"):
            local_folder(urls[2], settings)
        assert copied(cache) == {0, 1}
        process.kill()
        process.wait()
        (draft := cache.with_name("cache-folders") / f"other{DRAFT}").mkdir()
        local_folder(urls[2], settings)
        assert copied(cache) == {0, 2} and not draft.exists(), "1 was used before 0"
        local_folder(urls[3], settings)
    assert copied(cache) == {2, 3}, "this process uses 2"


def test_weights_larger_than_the_bound_are_refused(urls: list[str], tmp_path: Path) -> None:
    settings = CacheSettings(folder=str(tmp_path / "cache"), max_weights_bytes=SIZE - 1)
    with pytest.raises(DataUnreachable, match=r"weights/0: cannot be read \(.*no room") as raised:
        local_folder(urls[0], settings)
    assert "\n" not in str(raised.value)
    assert not copied(tmp_path / "cache")
