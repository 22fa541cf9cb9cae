"""The process that starts a run indexes its data; the workers read that, and refuse other data."""

from __future__ import annotations

import os
import pickle
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from shard_writers import write_mds, write_tar

from pipelines.custom_data import MdsDataset, TarDataset
from pipelines.custom_data.arrow import ArrowDataset
from pipelines.data.cache import LocalCopies
from pipelines.data.cache.shared_indexes import INDEXES
from pipelines.errors import DataUnreachable
from pipelines.settings import CacheSettings

NUM_SHARDS, NUM_IN_SHARD = 8, 3
DEADLY = 5
TAR_BYTES = 10_240
PROCESSES = get_context("forkserver")


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    (folder := tmp_path / "shards").mkdir()
    for shard in range(NUM_SHARDS):
        first = shard * NUM_IN_SHARD
        members = [(f"{row:03d}.cls", b"%d" % row) for row in range(first, first + NUM_IN_SHARD)]
        write_tar(folder / f"part-{shard:04d}.tar", members)
    return folder


@pytest.fixture
def published(tmp_path: Path) -> Iterator[str]:
    """The folder of indexes of a run."""
    yield str(tmp_path / "run" / "indexes")
    INDEXES.use(None)


def cache_of(machine: Path) -> CacheSettings:
    return CacheSettings(folder=str(machine), num_fetchers=1)


def opened(shards: Path, machine: Path, kind: type[TarDataset] = TarDataset) -> TarDataset:
    return kind(f"local://{shards}/part-*.tar", cache=cache_of(machine))


def sizes_in(machine: Path) -> list[int]:
    return [file.stat().st_size for file in machine.iterdir()]


class Dying(TarDataset):
    """It dies while it indexes."""

    def _made_index(self, number: int) -> Any:
        if number == DEADLY:
            os.kill(os.getpid(), signal.SIGKILL)
        return super()._made_index(number)


def start(function: Callable[..., object], *arguments: object) -> BaseProcess:
    process = PROCESSES.Process(target=function, args=arguments)
    process.start()
    return process


def ended(process: BaseProcess) -> int | None:
    process.join(60)
    return process.exitcode


def test_the_next_start_indexes_what_a_killed_one_has_left(shards: Path, tmp_path: Path) -> None:
    machine = tmp_path / "machine"
    assert ended(start(opened, shards, machine, Dying)) == -signal.SIGKILL
    before = {file: file.stat().st_ino for file in machine.iterdir()}
    kept = {file: ino for file, ino in before.items() if file.stat().st_size not in (0, TAR_BYTES)}
    assert len(kept) == DEADLY
    data = opened(shards, machine)
    assert [data[i]["cls"] for i in range(len(data))] == list(range(NUM_SHARDS * NUM_IN_SHARD))
    assert {file: file.stat().st_ino for file in kept} == kept, "read, not made again"


class DyingCopies(LocalCopies):
    """A process that dies while it fetches a pack for its machine, once others wait for it."""

    def using_made(self, identity: str, num_bytes: int, write: Callable[[BinaryIO], None]) -> Any:
        def half(out: BinaryIO) -> None:
            out.write(b"half")
            out.flush()
            marks = Path(self._cache().folder).parent
            (marks / "fetching").touch()
            await_file(marks / "waiting")
            time.sleep(0.2)
            os.kill(os.getpid(), signal.SIGKILL)

        return super().using_made(identity, num_bytes, half)


def await_file(file: Path) -> None:
    deadline = time.monotonic() + 30
    while not file.exists():
        assert time.monotonic() < deadline, file
        time.sleep(0.01)


def begin_run(shards: Path, published: str, machine: Path) -> None:
    opened(shards, machine)
    INDEXES.publish(published)


def die_fetching(shards: Path, published: str, machine: Path) -> None:
    INDEXES.use(published)
    data = opened(shards, machine.parent / "driver")  # for its name and identities
    INDEXES.find(data._name, data._identity(0), DyingCopies(cache_of(machine)))


def read_all(shards: Path, published: str, machine: Path) -> None:
    await_file(machine.parent / "fetching")
    (machine.parent / "waiting").touch()
    INDEXES.use(published)
    data = opened(shards, machine)
    INDEXES.refuse_other()
    assert len(data) == NUM_SHARDS * NUM_IN_SHARD


def test_workers_of_another_machine_read_the_indexes_once_also_if_one_dies(
    shards: Path, published: str, tmp_path: Path
) -> None:
    assert ended(start(begin_run, shards, published, tmp_path / "driver")) == 0
    names = [file.suffix for file in Path(published).iterdir()]
    assert sorted(names) == [".json", ".pack"], "one object for all indexes, and the catalogue"
    machine = tmp_path / "other"
    dying = start(die_fetching, shards, published, machine)
    workers = [start(read_all, shards, published, machine) for _ in range(3)]
    assert ended(dying) == -signal.SIGKILL
    assert [ended(worker) for worker in workers] == [0, 0, 0]
    [packed] = [size for size in sizes_in(machine) if size]
    assert packed == next(Path(published).glob("*.pack")).stat().st_size, "no tar was copied"
    INDEXES.use(published)
    data = opened(shards, machine)
    assert [data[i]["cls"] for i in range(len(data))] == list(range(NUM_SHARDS * NUM_IN_SHARD))


def write_rows(file: Path, counts: list[int]) -> None:
    pq.write_table(pa.table({"x": list(range(sum(counts)))}), file, row_group_size=counts[0])


def of_tars(folder: Path, rows: int) -> Callable[[], object]:
    write_tar(folder / "a.tar", [(f"{row:03d}.cls", b"%d" % row) for row in range(rows)])
    return lambda: TarDataset(folder / "a.tar", cache=cache_of(folder / "cache"))


def of_rows(folder: Path, rows: int) -> Callable[[], object]:
    write_rows(folder / "a.parquet", [rows])
    return lambda: ArrowDataset(folder / "a.parquet", cache=cache_of(folder / "cache"))


def of_mds(folder: Path, rows: int) -> Callable[[], object]:
    shutil.rmtree(folder / "mds", ignore_errors=True)
    values = [{"x": np.int64(row).tobytes()} for row in range(rows)]
    write_mds(folder / "mds", {"x": ("int", 8)}, values, NUM_IN_SHARD)
    return lambda: MdsDataset(folder / "mds", cache=cache_of(folder / "cache"))


@pytest.mark.parametrize("write", [of_tars, of_rows, of_mds])
def test_other_data_on_a_machine_are_refused_in_one_line_and_equal_ones_are_not(
    write: Callable[[Path, int], Callable[[], object]], published: str, tmp_path: Path
) -> None:
    open_data = write(tmp_path, 4)
    open_data()
    INDEXES.publish(published)
    INDEXES.use(published)
    for rows in (4, 5):
        write(tmp_path, rows)  # at another time
        open_data()
        if rows == 4:
            INDEXES.refuse_other()
    with pytest.raises(DataUnreachable, match="has other samples on this machine") as raised:
        INDEXES.refuse_other()
    assert "\n" not in str(raised.value)


def test_another_number_of_files_is_refused_in_one_line(
    shards: Path, published: str, tmp_path: Path
) -> None:
    opened(shards, tmp_path / "driver")
    INDEXES.publish(published)
    INDEXES.use(published)
    (shards / "part-0000.tar").unlink()
    opened(shards, tmp_path / "driver")
    with pytest.raises(DataUnreachable, match="has 7 files on this machine, but 8 where"):
        INDEXES.refuse_other()


def test_row_counts_at_urls_are_read_from_the_run_and_not_from_each_file(
    published: str, tmp_path: Path
) -> None:
    for number in range(3):
        write_rows(tmp_path / f"{number}.parquet", [2, 2])
    url, cache = f"local://{tmp_path}/*.parquet", cache_of(tmp_path / "cache")
    shipped = pickle.dumps(ArrowDataset(url, cache=cache))
    INDEXES.publish(published)
    for file in tmp_path.glob("*.parquet"):
        file.write_bytes(b"\0" * file.stat().st_size)
    data = pickle.loads(shipped)
    INDEXES.use(published)  # a process of the run knows it after it has got the dataset
    assert len(data) == 12, "no footer was read"


def test_damaged_indexes_of_a_run_are_reported_and_made_again(
    shards: Path, published: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    opened(shards, tmp_path / "driver")
    INDEXES.publish(published)
    INDEXES.use(published)
    for file in Path(published).glob("*.pack"):
        file.write_bytes(b"damaged")
    data = opened(shards, tmp_path / "other")
    assert [data[i]["cls"] for i in range(3)] == [0, 1, 2]
    [line] = [line for line in capsys.readouterr().err.splitlines() if "run's folder" in line]
    assert "no index can be read from the run's folder" in line and "is damaged" in line
