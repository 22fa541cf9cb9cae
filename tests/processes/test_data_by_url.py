"""Prepared data on a real S3 server: equal losses and one fetch of each shard, despite faults."""

from __future__ import annotations

import fcntl
import os
import socket
import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from harness import Outcome, run_in_processes
from s3 import CREDENTIALS, S3Proxy, start_s3_with_credentials
from unreachable_data import UNUSED_ADDRESS

from actors.local.process_fleet import NODE
from actors.ray_backend.driver import exit_code
from actors.storage.storage import open_storage
from elastic.protocol.events import Event, StepCommitted
from pipelines.data import prepare
from pipelines.data.cache.shard_cache import ROOM
from pipelines.data.corpus import find_corpus
from pipelines.data.prepare import prepare_at
from pipelines.data.prepared import open_prepared
from pipelines.data.tokens import find_tokenizer
from pipelines.data.windows import Windows
from pipelines.errors import UserError
from pipelines.run.plan import TrainRequest, make_plan
from pipelines.run.recipes import tiny
from pipelines.settings import CacheSettings, TrainSettings
from pipelines.settings.overrides import override

NUM_SHARD_ROWS = 2000
SHARD_BYTES = 5000
"""A little more than the size of a file of that many tokens."""
STEPS = 12
OUTAGE_S = 6.0


@pytest.fixture(scope="module")
def s3_proxy() -> Iterator[S3Proxy]:
    with start_s3_with_credentials() as proxy:
        yield proxy


@pytest.fixture(scope="module")
def local_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepared data of about 25 shards of 4 KB, of which a step reads up to 12."""
    folder = tmp_path_factory.mktemp("data")
    for number in range(40):
        text = f"text {number}: " + " ".join(str(number * i * i) for i in range(250))
        (folder / f"{number:02d}.txt").write_text(text)
    prepare(find_corpus(str(folder)), folder / "out", find_tokenizer(), 0.1, NUM_SHARD_ROWS)
    return folder / "out"


@pytest.fixture
def remote_data(local_data: Path, s3_proxy: S3Proxy, request: pytest.FixtureRequest) -> str:
    """The same data on the S3 server, in a separate folder for each test."""
    url = s3_proxy.url_of(f"data/{request.node.name}")
    storage = open_storage(url)
    for file in sorted(local_data.iterdir()):
        storage.write(file.name, file.read_bytes())
    s3_proxy.num_fetches.clear()
    return url


def make_settings(cache: Path, *changes: str) -> TrainSettings:
    cached = (f"cache.folder={cache}", "cache.reach_timeout_s=5", f"steps={STEPS}")
    return override(tiny(), [*cached, "eval_every=5", "eval_samples=6", *changes])


@pytest.fixture(scope="module")
def undisturbed(local_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    folder = tmp_path_factory.mktemp("undisturbed")
    return run_in_processes(folder / "run", make_settings(folder), 2, data_folder=str(local_data))


def train_on_remote_data(
    run: Path, remote_data: str, settings: TrainSettings, **changes: object
) -> Outcome:
    """Train with two workers on one machine, with the data on the S3 server."""
    return run_in_processes(
        run, settings, 2, data_folder=remote_data, environment=dict(CREDENTIALS), **changes
    )


def cached_shards(cache: Path) -> list[Path]:
    return [file for file in cache.iterdir() if file.name != ROOM]


def cache_size(cache: Path) -> int:
    """The bytes in the locked cache, including partial files."""
    with (cache / ROOM).open("ab") as lock_file:
        fcntl.flock(lock_file, fcntl.LOCK_EX)
        files = list(cache.iterdir())
        return sum(file.stat().st_size for file in files if file.exists())


def has_same_results(outcome: Outcome, undisturbed: Outcome) -> bool:
    assert outcome.stopped.outcome == "completed", outcome.stopped
    held_out_losses = [
        [line["loss"] for line in run.lines_of("Evaluated")] for run in (outcome, undisturbed)
    ]
    return outcome.losses() == undisturbed.losses() and held_out_losses[0] == held_out_losses[1]


def test_remote_data_give_the_losses_of_a_folder_and_fetch_each_shard_once(
    undisturbed: Outcome, remote_data: str, s3_proxy: S3Proxy, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    outcome = train_on_remote_data(tmp_path / "run", remote_data, make_settings(cache))
    assert has_same_results(outcome, undisturbed)
    shards = {
        name: times for name, times in s3_proxy.num_fetches.items() if name.endswith(".arrow")
    }
    assert len(shards) == len(cached_shards(cache)) > 20
    assert set(shards.values()) == {1}, "two workers of one machine share what is fetched"


@pytest.mark.slow
def test_cache_stays_within_max_bytes_with_more_shards_than_fit(
    undisturbed: Outcome, remote_data: str, s3_proxy: S3Proxy, tmp_path: Path
) -> None:
    cache, max_bytes = tmp_path / "cache", 8 * SHARD_BYTES
    sizes: list[int] = []

    def measure(event: Event) -> None:
        if isinstance(event, StepCommitted):
            sizes.append(cache_size(cache))

    small = make_settings(cache, f"cache.max_bytes={max_bytes}", "cache.prefetch_steps=1")
    outcome = train_on_remote_data(tmp_path / "run", remote_data, small, on_event=measure)
    assert has_same_results(outcome, undisturbed)
    assert sum(s3_proxy.num_fetches.values()) > len(s3_proxy.num_fetches) > 20, (
        "some were fetched again"
    )
    assert len(sizes) == STEPS and max(*sizes, cache_size(cache)) <= max_bytes


@pytest.mark.slow
def test_damaged_cache_files_are_fetched_again(
    undisturbed: Outcome, remote_data: str, s3_proxy: S3Proxy, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    assert has_same_results(
        train_on_remote_data(tmp_path / "first", remote_data, make_settings(cache)), undisturbed
    )
    flipped, truncated, emptied, *_ = cached_shards(cache)
    content = flipped.read_bytes()
    flipped.write_bytes(content[:-700] + bytes([content[-700] ^ 1]) + content[-699:])
    os.truncate(truncated, truncated.stat().st_size - 1)
    os.truncate(emptied, 0)
    s3_proxy.num_fetches.clear()
    assert has_same_results(
        train_on_remote_data(tmp_path / "second", remote_data, make_settings(cache)), undisturbed
    )
    num_fetches = [times for name, times in s3_proxy.num_fetches.items() if name.endswith(".arrow")]
    assert num_fetches == [1, 1, 1]


@pytest.mark.soak
def test_training_continues_after_an_outage_of_the_object_store(
    undisturbed: Outcome, remote_data: str, s3_proxy: S3Proxy, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    small = make_settings(cache, f"cache.max_bytes={8 * SHARD_BYTES}", "cache.prefetch_steps=1")
    timers: list[threading.Timer] = []

    def begin_outage(event: Event) -> None:
        if isinstance(event, StepCommitted) and event.record.step == 4:
            s3_proxy.close()
            timers.append(threading.Timer(OUTAGE_S, s3_proxy.open))
            timers[0].start()

    outcome = train_on_remote_data(tmp_path / "run", remote_data, small, on_event=begin_outage)
    timers[0].join()
    assert has_same_results(outcome, undisturbed)
    times = [line["time"] for line in outcome.metrics]
    assert max(later - sooner for sooner, later in pairwise(times)) > OUTAGE_S - 1, (
        "a step waited for the store"
    )
    assert not outcome.lines_of("WorkerLost") and len(outcome.lines_of("Resume")) == 1


@pytest.mark.slow
def test_machine_without_access_to_the_data_is_reported_and_others_train(
    undisturbed: Outcome, remote_data: str, tmp_path: Path
) -> None:
    outcome = train_with_cut_off_workers(1, remote_data, tmp_path, start_timeout_s=3.0)
    assert outcome.stopped.outcome == "completed", outcome.stopped
    assert outcome.losses() == pytest.approx(undisturbed.losses(), rel=1e-5)
    [raised] = outcome.lines_of("WorkerRaised")
    assert (raised["kind"], raised["generation"]) == ("machine", 0)
    message = raised["message"]
    assert message.startswith(f"node {NODE} ({socket.gethostname()}): s3://bucket/data/")
    assert "the data cannot be read" in message and UNUSED_ADDRESS.split(":")[0] in message
    assert "\n" not in message
    assert all(raised["worker"] not in line["workers"] for line in outcome.lines_of("Resume"))
    [warning] = [line for line in outcome.lines_of("Warned") if line["kind"] == "machine"]
    assert warning["text"] == f"{raised['worker']}: {message}"


@pytest.mark.slow
def test_run_ends_if_no_machine_reaches_the_data(remote_data: str, tmp_path: Path) -> None:
    outcome = train_with_cut_off_workers(100, remote_data, tmp_path)
    stopped = outcome.stopped
    assert (stopped.outcome, exit_code(stopped, 0)) == ("user_error", 2)
    assert "s3://bucket/data/" in stopped.reason and "the data cannot be read" in stopped.reason
    assert "\n" not in stopped.reason and not stopped.traceback
    assert not outcome.lines_of("WorkerReady")


def train_with_cut_off_workers(
    num: int, remote_data: str, folder: Path, **policy: float
) -> Outcome:
    """Train with first worker processes that cannot reach the data."""
    slots = folder / "cut-off"
    slots.mkdir()
    return run_in_processes(
        folder / "run",
        make_settings(folder / "cache", "cache.reach_timeout_s=0.5"),
        2,
        program="unreachable_data:UnreachableDataProgram",
        data_folder=remote_data,
        environment={**CREDENTIALS, "NUM_CUT_OFF": str(num), "CUT_OFF_FOLDER": str(slots)},
        restart_backoff_s=0.1,
        **policy,
    )


def test_unreadable_data_at_the_driver_are_a_one_line_error(
    s3_proxy: S3Proxy, tmp_path: Path
) -> None:
    def refusal_of(data: str) -> str:
        request = TrainRequest(
            "tiny", "run", str(tmp_path), data=data, changes=("cache.reach_timeout_s=1",)
        )
        with pytest.raises(UserError) as error:
            make_plan(request, num_gpus=0)
        assert "\n" not in str(error.value)
        return str(error.value)

    missing_url = s3_proxy.url_of("data/nothing-there")
    assert "data/nothing-there/index.json" in refusal_of(missing_url)
    assert "prepare the data in" in refusal_of(missing_url)
    assert "environment" in refusal_of("s3://me:hunter2@bucket/data")
    assert "hunter2" not in refusal_of("s3://me:hunter2@bucket/data")
    s3_proxy.close()
    try:
        assert "cannot be reached" in refusal_of(missing_url)
    finally:
        s3_proxy.open()
    assert not list(tmp_path.iterdir())


def test_text_of_a_run_without_a_shared_disk_is_prepared_in_its_storage(
    s3_proxy: S3Proxy, tmp_path: Path
) -> None:
    (tmp_path / "a.txt").write_text("some words " * 5000)
    data_folders = []
    for name in ("one", "two"):
        request = TrainRequest(
            "tiny", name, s3_proxy.url_of("text/runs"), data=str(tmp_path / "a.txt")
        )
        data_folders.append(make_plan(request, num_gpus=0).run.program.kwargs["data_folder"])
    assert data_folders[0] == data_folders[1] and data_folders[0].startswith(
        "s3://bucket/text/runs/data/"
    )
    assert open_prepared(data_folders[0]).index.splits["train"].num_tokens > 50_000
    assert [file.name for file in tmp_path.iterdir()] == ["a.txt"], (
        "no file stays on the disk of the driver"
    )


def test_data_are_prepared_at_a_url(
    local_data: Path, s3_proxy: S3Proxy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "a.txt"
    text.write_text("some words " * 5000)
    url = s3_proxy.url_of("data/prepared")
    for _ in range(2):  # the second call finds the data of the first
        index = prepare_at(find_corpus(str(text)), url, find_tokenizer(), 0.0)
    assert open_prepared(url).index == index
    local_index = prepare(find_corpus(str(text)), tmp_path / "out", find_tokenizer(), 0.0)
    assert local_index.digest == index.digest
    cache = CacheSettings(folder=str(tmp_path / "cache"))
    remote_windows = Windows(open_prepared(url, cache), "train", 64)
    local_windows = Windows(tmp_path / "out", "train", 64)
    ids = range(local_windows.num_samples)
    assert all(
        a.equal(b) for a, b in zip(remote_windows.read(ids), local_windows.read(ids), strict=True)
    )
    with pytest.raises(UserError, match="was prepared from other text or settings"):
        prepare_at(find_corpus(str(text)), url, find_tokenizer(), 0.5)
    with pytest.raises(UserError, match=r"holds other files, such as .*index\.json"):
        prepare_at(find_corpus(str(text)), s3_proxy.url_of("data"), find_tokenizer(), 0.5)
