"""Storage by URL: a folder and a real S3 server behave the same."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from s3 import S3Proxy, start_s3_with_credentials

from actors.storage.errors import LeaseLost, RunTaken
from actors.storage.lease import Lease, claim, owner_of
from actors.storage.line_logs import LineLog
from actors.storage.line_writers import open_lines
from actors.storage.storage import Storage, is_remote, open_storage


@pytest.fixture(scope="module")
def s3_proxy() -> Iterator[S3Proxy]:
    with start_s3_with_credentials() as proxy:
        yield proxy


@pytest.fixture(params=["disk", "s3"])
def storage(request: pytest.FixtureRequest, tmp_path: Path, s3_proxy: S3Proxy) -> Storage:
    if request.param == "disk":
        return open_storage(str(tmp_path))
    return open_storage(s3_proxy.url).at(tmp_path.name)


def test_files_are_complete_and_listed(storage: Storage) -> None:
    assert storage.files() == {} and storage.folders() == []
    storage.write("a/b/c", b"0123456789")
    storage.write("a/d", b"")
    assert storage.files() == {"a/b/c": 10, "a/d": 0}
    assert storage.at("a").files() == {"b/c": 10, "d": 0}
    assert storage.files("a/b") == {"a/b/c": 10}
    assert storage.folders() == ["a"] and storage.at("a").folders() == ["b"]
    assert open_storage(storage.at("a").url).read("b/c") == b"0123456789"
    assert storage.read("a/b/c", 3) == b"3456789"
    assert storage.read("a/b/c", 3, 4) == b"3456"
    assert storage.read("a/b/c", 20) == b""
    storage.write("a/b/c", b"new")
    assert (storage.read("a/b/c"), storage.size("a/b/c")) == (b"new", 3)
    written_at = storage.modified("a/b/c")
    assert written_at is not None and abs(time.time() - written_at) < 60.0


def test_missing_files(storage: Storage) -> None:
    assert storage.size("none") is None and storage.modified("none") is None
    with pytest.raises(FileNotFoundError):
        storage.read("none")
    storage.remove("none")


def test_files_and_folders_are_removed(storage: Storage) -> None:
    for name in ("a/b/c", "a/b/d", "a/e", "f"):
        storage.write(name, b"x")
    storage.remove("a/b")
    storage.remove("f")
    assert storage.files() == {"a/e": 1}


def test_folder_of_an_object_store_is_removed_in_bulk(s3_proxy: S3Proxy, tmp_path: Path) -> None:
    """Neither its objects nor markers of folders remain, and requests do not depend on them."""
    storage = open_storage(s3_proxy.url).at(tmp_path.name)
    for number in range(20):
        storage.write(f"checkpoints/step-1/part-{number}", b"x")
    storage.write("checkpoints/step-2/part-0", b"x")
    before = s3_proxy.num_requests.total()
    storage.remove("checkpoints/step-1/part-0")
    storage.remove("checkpoints/step-1")
    storage.remove("checkpoints/step-1")
    assert s3_proxy.num_requests.total() - before < 20
    assert storage.at("checkpoints").folders() == ["step-2"]
    assert storage.files() == {"checkpoints/step-2/part-0": 1}


def test_stream_survives_an_outage_of_an_object_store_for_seconds(
    s3_proxy: S3Proxy, tmp_path: Path
) -> None:
    """Three tries of a request would end after 1.4 s, and a large file would be lost with it."""
    storage = open_storage(s3_proxy.url).at(tmp_path.name)
    content = bytes(24 << 20)
    with storage.writing("part") as out:
        s3_proxy.close()
        reopening = threading.Timer(3.0, s3_proxy.open)
        reopening.start()
        out.write(content)
    reopening.join()
    assert storage.size("part") == len(content)


def test_interrupted_write_is_never_visible(storage: Storage) -> None:
    storage.write("kept", b"old")
    for name in ("kept", "new"):
        with pytest.raises(RuntimeError, match="broke"), storage.writing(f"{name}-file") as out:
            out.write(b"half")
            raise RuntimeError("it broke")
    assert storage.files() == {"kept": 3}


def test_log_of_two_writers_reads_back_as_one(storage: Storage) -> None:
    """Two consecutive writers; 2,000 lines of 1 KB make several segments on S3."""
    log = LineLog(storage, "log.jsonl")
    assert not log.exists() and list(log.lines()) == []
    for first in (0, 1000):
        lines = open_lines(log)
        for number in range(first, first + 1000):
            lines.write({"number": number, "filler": "x" * 1000})
            if number == 700:
                wait_until(log.exists)
        lines.make_durable()
        lines.close()
        assert not lines.trouble
    assert log.exists()
    assert [line["number"] for line in log.lines()] == list(range(2000))
    content = b"".join(log.blocks())
    offset = content.index(b"\n", 1234) + 1
    assert b"".join(log.blocks(offset)) == content[offset:]
    if is_remote(storage.url):
        assert len(log.segments()) == 2 and len(content) > 2e6


def test_lines_wait_until_storage_accepts_them(s3_proxy: S3Proxy, tmp_path: Path) -> None:
    log = LineLog(open_storage(s3_proxy.url).at(tmp_path.name), "log.jsonl")
    lines = open_lines(log)
    lines.write({"number": 1})
    wait_until(log.exists)
    s3_proxy.close()
    lines.write({"number": 2})
    wait_until(lambda: bool(lines.trouble))
    s3_proxy.open()
    lines.write({"number": 3})
    lines.close()
    assert not lines.trouble
    assert [line["number"] for line in log.lines()] == [1, 2, 3]


def test_process_that_returns_after_losing_its_lease_changes_nothing(
    s3_proxy: S3Proxy, tmp_path: Path
) -> None:
    """A is cut off with lines that it has not uploaded, B takes over and writes, A returns."""
    second_s3_proxy = S3Proxy(s3_proxy.target_port)
    second_s3_proxy.open()
    storage, storage_of_a = (
        open_storage(proxy.url).at(tmp_path.name).at("run") for proxy in (s3_proxy, second_s3_proxy)
    )
    log, log_of_a = LineLog(storage, "journal.jsonl"), LineLog(storage_of_a, "journal.jsonl")
    lease_of_a = claim(storage_of_a, actor="a")
    lease_of_a.start_renewing()
    writer_a = open_lines(log_of_a, lease_of_a.epoch, lease_of_a.check_now)
    writer_a.write({"number": 0})
    wait_until(lambda: list(log.lines()) == [{"number": 0}])
    second_s3_proxy.close()
    for number in range(1, 100):
        writer_a.write({"number": number, "filler": "x" * 1000})
    wait_until(lambda: bool(writer_a.trouble))
    lease_of_other_host = {**json.loads(storage.read(*storage.files("lease"))), "host": "elsewhere"}
    storage.write(*storage.files("lease"), json.dumps(lease_of_other_host).encode())
    lease_of_b = claim_when_stale(storage)
    writer_b = open_lines(log, lease_of_b.epoch, lease_of_b.check_now)
    for number in range(100, 111):
        writer_b.write({"number": number})
    assert writer_b.close() == ""
    second_s3_proxy.open()
    assert writer_a.close() == ""  # its lines are dropped, not lost
    lease_of_a.release()
    assert [line["number"] for line in log.lines()] == [0, *range(100, 111)]
    lease_of_b.release()
    assert owner_of(storage) is None
    second_s3_proxy.close()


def test_at_most_one_of_many_claimants_gets_the_run(storage: Storage) -> None:
    claimed, barrier = [], threading.Barrier(6)

    def try_to_claim() -> None:
        barrier.wait()
        with suppress(RunTaken):  # at most one succeeds
            claimed.append(claim(storage))

    threads = [threading.Thread(target=try_to_claim) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(claimed) <= 1
    if claimed:
        assert owner_of(storage) is not None
        with pytest.raises(RunTaken, match="drives this run"):
            claim(storage)


def test_released_or_stale_lease_is_taken_over(storage: Storage) -> None:
    first = claim(storage)
    first.renew()
    first.release()
    assert owner_of(storage) is None
    second = claim(storage)
    assert second.epoch == first.epoch + 1
    with pytest.raises(LeaseLost):
        first.check_now()
    [name] = storage.files("lease")
    lease_of_other_host = {**json.loads(storage.read(name)), "host": "elsewhere"}
    storage.write(name, json.dumps(lease_of_other_host).encode())
    with pytest.raises(RunTaken, match="on elsewhere drives this run"):
        claim(storage)
    third = claim_when_stale(storage)
    assert third.epoch == second.epoch + 1
    second.release()  # the lease is lost, so nothing is written
    assert len(storage.files("lease")) == 1 and owner_of(storage) is not None


def claim_when_stale(storage: Storage) -> Lease:
    deadline = time.monotonic() + 30.0
    while True:
        try:
            return claim(storage, stale_s=1.0)
        except RunTaken:
            assert time.monotonic() < deadline
            time.sleep(0.2)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30.0
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("s3://key:secret@bucket/x", "environment"),
        ("s3://", "bucket"),
        ("s3://bucket/x?regoin=eu", "regoin"),
        ("ftp://host/x", "ftp"),
    ],
)
def test_invalid_urls_are_rejected(url: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        open_storage(url)
