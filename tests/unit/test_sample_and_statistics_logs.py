"""Logs of the training thread: an outage of storage neither blocks nor ends the thread."""

from __future__ import annotations

import json
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from memory_storage import MemoryStorage

from actors.storage.file_names import STATISTICS
from actors.storage.line_logs import LineLog
from actors.storage.storage import DiskStorage
from actors.worker.statistics_log import StatisticsLog
from elastic.protocol.votes import StepRecord
from pipelines.training.replica.sample_log import SampleLog, append_samples


class ReplicaStatistics:
    """The method of a replica that the log needs."""

    def statistics(self) -> dict[str, dict[str, float]]:
        return {"layer": {"grad_norm": 1.0}}


class OutageStorage(MemoryStorage):
    """While `refusal` is set, listings are refused as well."""

    def files(self, folder: str = "") -> dict[str, int]:
        if self.refusal:
            raise self.refusal
        return super().files(folder)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10.0
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def log_step(log: StatisticsLog, step: int) -> None:
    replica: Any = ReplicaStatistics()
    record = StepRecord(0.0, step, 1, 2, 1.0, 1, 0.1, 1.0, 0.5, skipped=False)
    log.log_step(replica, record, world_rank=0)


def test_statistics_wait_in_memory_during_an_outage_of_the_object_store() -> None:
    storage: Any = OutageStorage()
    storage.refusal = OSError("storage is down")
    log = StatisticsLog(storage)
    for step in (1, 2):
        log_step(log, step)
    storage.refusal = None
    log.close()
    assert [row["step"] for row in LineLog(storage, STATISTICS).lines()] == [1, 2]


def test_statistics_that_could_not_be_written_are_reported(
    capsys: pytest.CaptureFixture[str],
) -> None:
    storage: Any = OutageStorage()
    storage.refusal = OSError("storage is down")
    log = StatisticsLog(storage)
    log_step(log, 1)
    log.close()
    message = "elastic: 1 line of statistics.jsonl not written: storage is down\n"
    assert capsys.readouterr().err == message


def test_statistics_wait_in_memory_while_the_run_folder_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("in the way")
    log = StatisticsLog(DiskStorage(tmp_path / "run"))
    log_step(log, 1)
    (tmp_path / "run").unlink()
    log_step(log, 2)
    log.close()
    assert [row["step"] for row in read_rows(tmp_path / "run" / STATISTICS)] == [1, 2]


def test_sample_ids_wait_in_memory_until_their_file_can_be_opened(tmp_path: Path) -> None:
    file = tmp_path / "run" / "samples.jsonl"
    append_samples(file, 1, 1, 0, [4, 2])
    append_samples(file, 2, 1, 0, [1])
    file.parent.mkdir()
    wait_until(lambda: file.exists() and file.read_bytes().count(b"\n") == 2)
    assert [(row["step"], row["ids"]) for row in read_rows(file)] == [(1, [4, 2]), (2, [1])]


def test_line_cut_by_a_full_disk_is_written_again_in_full(tmp_path: Path) -> None:
    file = tmp_path / "samples.jsonl"
    log = SampleLog(file, retry_every_s=0.05)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, before[1]))
    try:
        log.append(b'{"step": 1}\n')
        assert log.num_waiting == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    wait_until(lambda: not log.num_waiting)
    log.append(b'{"step": 2}\n')
    assert file.read_text().splitlines() == ['{"step": 1', '{"step": 1}', '{"step": 2}']


def read_rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]
