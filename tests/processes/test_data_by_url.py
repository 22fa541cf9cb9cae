"""Prepared data on a real S3 server: equal losses, and each shard fetched once, through faults."""

from __future__ import annotations

import fcntl
import os
import socket
import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from cut_off import NOBODY
from harness import Outcome, run_in_processes
from s3 import CREDENTIALS, S3Proxy, start_s3_with_credentials

from actors.local.process_fleet import NODE
from actors.ray_backend.driver import exit_code
from actors.storage.storage import open_storage
from elastic.protocol.events import Event, StepCommitted
from pipelines.data import prepare
from pipelines.data.cache import ROOM
from pipelines.data.corpus import find_corpus
from pipelines.data.prepare import prepare_at
from pipelines.data.prepared import open_prepared
from pipelines.data.tokens import find_tokenizer
from pipelines.data.windows import Windows
from pipelines.run.plan import TrainRequest, make_plan
from pipelines.run.recipes import tiny
from pipelines.settings import CacheSettings, TrainSettings
from pipelines.settings.errors import UserError
from pipelines.settings.overrides import override

NUM_SHARD_ROWS = 2000
SHARD_BYTES = 5000
"""A little more than the size of a file of that many tokens."""
STEPS = 12
OUTAGE_S = 6.0


@pytest.fixture(scope="module")
def s3_proxy() -> Iterator[S3Proxy]:
    with start_s3_with_credentials() as opened:
        yield opened


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepared data of about 25 shards of 4 KB, of which a step reads up to 12."""
    folder = tmp_path_factory.mktemp("data")
    for number in range(40):
        text = f"text {number}: " + " ".join(str(number * i * i) for i in range(250))
        (folder / f"{number:02d}.txt").write_text(text)
    prepare(find_corpus(str(folder)), folder / "out", find_tokenizer(), 0.1, NUM_SHARD_ROWS)
    return folder / "out"


@pytest.fixture
def there(here: Path, s3_proxy: S3Proxy, request: pytest.FixtureRequest) -> str:
    """The same data on the S3 server, in a separate folder for each test."""
    url = s3_proxy.url_of(f"data/{request.node.name}")
    storage = open_storage(url)
    for file in sorted(here.iterdir()):
        storage.write(file.name, file.read_bytes())
    s3_proxy.num_fetches.clear()
    return url


def settings(cache: Path, *changes: str) -> TrainSettings:
    cached = (f"cache.folder={cache}", "cache.reach_timeout_s=5", f"steps={STEPS}")
    return override(tiny(), [*cached, "eval_every=5", "eval_samples=6", *changes])


@pytest.fixture(scope="module")
def undisturbed(here: Path, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    folder = tmp_path_factory.mktemp("undisturbed")
    return run_in_processes(folder / "run", settings(folder), 2, data_folder=str(here))


def fetching(run: Path, there: str, settings: TrainSettings, **changes: object) -> Outcome:
    """A run of two workers on one machine, with the data on the S3 server."""
    return run_in_processes(
        run, settings, 2, data_folder=there, environment=dict(CREDENTIALS), **changes
    )


def shards_of(cache: Path) -> list[Path]:
    return [file for file in cache.iterdir() if file.name != ROOM]


def size_of(cache: Path) -> int:
    """The bytes in the cache, partial files included, while it is locked."""
    with (cache / ROOM).open("ab") as room:
        fcntl.flock(room, fcntl.LOCK_EX)
        there = list(cache.iterdir())
        return sum(file.stat().st_size for file in there if file.exists())


def same(outcome: Outcome, undisturbed: Outcome) -> bool:
    assert outcome.stopped.outcome == "completed", outcome.stopped
    evaluated = [
        [line["loss"] for line in one.lines_of("Evaluated")] for one in (outcome, undisturbed)
    ]
    return outcome.losses() == undisturbed.losses() and evaluated[0] == evaluated[1]


def test_losses_are_those_of_a_folder_and_each_shard_is_fetched_once(
    undisturbed: Outcome, there: str, s3_proxy: S3Proxy, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    outcome = fetching(tmp_path / "run", there, settings(cache))
    assert same(outcome, undisturbed)
    shards = {
        name: times for name, times in s3_proxy.num_fetches.items() if name.endswith(".arrow")
    }
    assert len(shards) == len(shards_of(cache)) > 20
    assert set(shards.values()) == {1}, "two workers of one machine share what is fetched"


@pytest.mark.slow
def test_the_cache_keeps_its_bound_with_more_shards_than_fit(
    undisturbed: Outcome, there: str, s3_proxy: S3Proxy, tmp_path: Path
) -> None:
    cache, most = tmp_path / "cache", 8 * SHARD_BYTES
    sizes: list[int] = []

    def look(event: Event) -> None:
        if isinstance(event, StepCommitted):
            sizes.append(size_of(cache))

    small = settings(cache, f"cache.max_bytes={most}", "cache.prefetch_steps=1")
    outcome = fetching(tmp_path / "run", there, small, on_event=look)
    assert same(outcome, undisturbed)
    assert sum(s3_proxy.num_fetches.values()) > len(s3_proxy.num_fetches) > 20, (
        "some were fetched again"
    )
    assert len(sizes) == STEPS and max(*sizes, size_of(cache)) <= most


@pytest.mark.slow
def test_damaged_files_of_the_cache_are_fetched_again(
    undisturbed: Outcome, there: str, s3_proxy: S3Proxy, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    assert same(fetching(tmp_path / "first", there, settings(cache)), undisturbed)
    flipped, cut, emptied, *_ = shards_of(cache)
    content = flipped.read_bytes()
    flipped.write_bytes(content[:-700] + bytes([content[-700] ^ 1]) + content[-699:])
    os.truncate(cut, cut.stat().st_size - 1)
    os.truncate(emptied, 0)
    s3_proxy.num_fetches.clear()
    assert same(fetching(tmp_path / "second", there, settings(cache)), undisturbed)
    again = [times for name, times in s3_proxy.num_fetches.items() if name.endswith(".arrow")]
    assert again == [1, 1, 1]


@pytest.mark.slow
def test_training_continues_when_the_store_is_back(
    undisturbed: Outcome, there: str, s3_proxy: S3Proxy, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    small = settings(cache, f"cache.max_bytes={8 * SHARD_BYTES}", "cache.prefetch_steps=1")
    again: list[threading.Timer] = []

    def shut(event: Event) -> None:
        if isinstance(event, StepCommitted) and event.record.step == 4:
            s3_proxy.close()
            again.append(threading.Timer(OUTAGE_S, s3_proxy.open))
            again[0].start()

    outcome = fetching(tmp_path / "run", there, small, on_event=shut)
    again[0].join()
    assert same(outcome, undisturbed)
    times = [line["time"] for line in outcome.metrics]
    assert max(later - sooner for sooner, later in pairwise(times)) > OUTAGE_S - 1, "it did wait"
    assert not outcome.lines_of("WorkerLost") and len(outcome.lines_of("Resume")) == 1


@pytest.mark.slow
def test_a_machine_that_cannot_reach_the_data_reports_it_and_others_train(
    undisturbed: Outcome, there: str, tmp_path: Path
) -> None:
    outcome = cut_off(1, there, tmp_path, start_timeout_s=3.0)
    assert outcome.stopped.outcome == "completed", outcome.stopped
    assert outcome.losses() == pytest.approx(undisturbed.losses(), rel=1e-5)
    [raised] = outcome.lines_of("WorkerRaised")
    assert (raised["kind"], raised["generation"]) == ("machine", 0)
    told = raised["message"]
    assert told.startswith(f"node {NODE} ({socket.gethostname()}): s3://bucket/data/")
    assert "the data cannot be read" in told and NOBODY.split(":")[0] in told
    assert "\n" not in told
    assert all(raised["worker"] not in line["workers"] for line in outcome.lines_of("Resume"))
    [warned] = [line for line in outcome.lines_of("Warned") if line["kind"] == "machine"]
    assert warned["text"] == f"{raised['worker']}: {told}"


@pytest.mark.slow
def test_a_run_without_a_machine_that_reaches_the_data_ends(there: str, tmp_path: Path) -> None:
    outcome = cut_off(100, there, tmp_path)
    stopped = outcome.stopped
    assert (stopped.outcome, exit_code(stopped, 0)) == ("user_error", 2)
    assert "s3://bucket/data/" in stopped.reason and "the data cannot be read" in stopped.reason
    assert "\n" not in stopped.reason and not stopped.traceback
    assert not outcome.lines_of("WorkerReady")


def cut_off(num: int, there: str, folder: Path, **policy: float) -> Outcome:
    """A run whose first worker processes cannot reach the data."""
    slots = folder / "cut-off"
    slots.mkdir()
    return run_in_processes(
        folder / "run",
        settings(folder / "cache", "cache.reach_timeout_s=0.5"),
        2,
        program="cut_off:CutOffProgram",
        data_folder=there,
        environment={**CREDENTIALS, "NUM_CUT_OFF": str(num), "CUT_OFF_FOLDER": str(slots)},
        restart_backoff_s=0.1,
        **policy,
    )


def test_unreadable_data_at_the_driver_are_a_one_line_error(
    s3_proxy: S3Proxy, tmp_path: Path
) -> None:
    def refused(data: str) -> str:
        asked = TrainRequest(
            "tiny", "run", str(tmp_path), data=data, changes=("cache.reach_timeout_s=1",)
        )
        with pytest.raises(UserError) as told:
            make_plan(asked, num_gpus=0)
        assert "\n" not in str(told.value)
        return str(told.value)

    nothing = s3_proxy.url_of("data/nothing-there")
    assert "data/nothing-there/index.json" in refused(nothing)
    assert "prepare the data in" in refused(nothing)
    assert "environment" in refused("s3://me:hunter2@bucket/data")
    assert "hunter2" not in refused("s3://me:hunter2@bucket/data")
    s3_proxy.close()
    try:
        assert "cannot be reached" in refused(nothing)
    finally:
        s3_proxy.open()
    assert not list(tmp_path.iterdir())


def test_text_of_a_run_without_a_shared_disk_is_prepared_in_its_storage(
    s3_proxy: S3Proxy, tmp_path: Path
) -> None:
    (tmp_path / "a.txt").write_text("some words " * 5000)
    places = []
    for name in ("one", "two"):
        asked = TrainRequest(
            "tiny", name, s3_proxy.url_of("text/runs"), data=str(tmp_path / "a.txt")
        )
        places.append(make_plan(asked, num_gpus=0).run.program.kwargs["data_folder"])
    assert places[0] == places[1] and places[0].startswith("s3://bucket/text/runs/data/")
    assert open_prepared(places[0]).index.splits["train"].num_tokens > 50_000
    assert [file.name for file in tmp_path.iterdir()] == ["a.txt"], "nothing is kept here"


def test_data_are_prepared_at_a_url(
    here: Path, s3_proxy: S3Proxy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "a.txt"
    text.write_text("some words " * 5000)
    url = s3_proxy.url_of("data/prepared")
    for _ in range(2):  # the second finds the first
        index = prepare_at(find_corpus(str(text)), url, find_tokenizer(), 0.0)
    assert open_prepared(url).index == index
    local = prepare(find_corpus(str(text)), tmp_path / "out", find_tokenizer(), 0.0)
    assert local.digest == index.digest
    cache = CacheSettings(folder=str(tmp_path / "cache"))
    remote = Windows(open_prepared(url, cache), "train", 64)
    near = Windows(tmp_path / "out", "train", 64)
    ids = range(near.num_samples)
    assert all(a.equal(b) for a, b in zip(remote.read(ids), near.read(ids), strict=True))
    with pytest.raises(UserError, match="was prepared from other text or settings"):
        prepare_at(find_corpus(str(text)), url, find_tokenizer(), 0.5)
    with pytest.raises(UserError, match=r"holds other files, such as .*index\.json"):
        prepare_at(find_corpus(str(text)), s3_proxy.url_of("data"), find_tokenizer(), 0.5)
