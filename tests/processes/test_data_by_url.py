"""Prepared data on a real S3 server: the same losses, each shard once, whatever goes wrong."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import Outcome, run_plainly
from s3 import CREDENTIALS, Door, s3_server

from actors.storage import open_storage
from pipelines.data import find_corpus, find_tokenizer, prepare
from pipelines.overrides import override
from pipelines.recipes import tiny
from pipelines.settings import TrainSettings

NUM_SHARD_ROWS = 2000
STEPS = 12


@pytest.fixture(scope="module")
def door() -> Iterator[Door]:
    with pytest.MonkeyPatch.context() as environment:
        for name, value in CREDENTIALS.items():
            environment.setenv(name, value)
        with s3_server() as opened:
            yield opened


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepared data of some 25 shards of 4 KB, where a step reads up to 12 of them."""
    folder = tmp_path_factory.mktemp("data")
    for number in range(40):
        text = f"text {number}: " + " ".join(str(number * i * i) for i in range(250))
        (folder / f"{number:02d}.txt").write_text(text)
    prepare(find_corpus(str(folder)), folder / "out", find_tokenizer(), 0.1, NUM_SHARD_ROWS)
    return folder / "out"


@pytest.fixture
def there(here: Path, door: Door, request: pytest.FixtureRequest) -> str:
    """The same data behind the door, in a folder of the test's own."""
    url = door.url_of(f"data/{request.node.name}")
    storage = open_storage(url)
    for file in sorted(here.iterdir()):
        storage.write(file.name, file.read_bytes())
    door.fetched.clear()
    return url


def settings(cache: Path, *changes: str) -> TrainSettings:
    cached = (f"cache.folder={cache}", "cache.reach_timeout_s=5", f"steps={STEPS}")
    return override(tiny(), [*cached, "eval_every=5", "eval_samples=6", *changes])


@pytest.fixture(scope="module")
def undisturbed(here: Path, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    folder = tmp_path_factory.mktemp("undisturbed")
    return run_plainly(folder / "run", settings(folder), 2, data_folder=str(here))


def fetching(run: Path, there: str, settings: TrainSettings, **changes: object) -> Outcome:
    """A run of two workers of one machine with the data behind the door."""
    return run_plainly(
        run, settings, 2, data_folder=there, environment=dict(CREDENTIALS), **changes
    )


def shards_of(cache: Path) -> list[Path]:
    return [file for file in cache.iterdir() if file.name != ".room"]


def same(outcome: Outcome, undisturbed: Outcome) -> bool:
    assert outcome.stopped.outcome == "completed", outcome.stopped
    evaluated = [[line["loss"] for line in one.told("Evaluated")] for one in (outcome, undisturbed)]
    return outcome.losses() == undisturbed.losses() and evaluated[0] == evaluated[1]


def test_losses_are_those_of_a_folder_and_each_shard_is_fetched_once(
    undisturbed: Outcome, there: str, door: Door, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    outcome = fetching(tmp_path / "run", there, settings(cache))
    assert same(outcome, undisturbed)
    shards = {name: times for name, times in door.fetched.items() if name.endswith(".arrow")}
    assert len(shards) == len(shards_of(cache)) > 20
    assert set(shards.values()) == {1}, "two workers of one machine share what is fetched"
