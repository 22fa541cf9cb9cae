"""A worker's part of a checkpoint: refused writes are retried; a large part has several files."""

from __future__ import annotations

import errno
import queue
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from actors.runtime.faults import FaultInjector
from actors.storage.checkpoint_files import folder_of, publish
from actors.storage.storage import DiskStorage
from actors.worker import part_writer
from actors.worker.part_writer import CheckpointPart, PartWriter, split_part
from elastic.geometry.layout import Layout
from elastic.geometry.regions import Region
from elastic.geometry.tensor_specs import TensorSpec
from elastic.protocol.events import Event, PartFailed, PartWritten
from pipelines.training.checkpoint.part_file import write_part
from pipelines.training.checkpoint.reader import Checkpoint

STEP, GENERATION = 7, 1
LATE_S = 30.0
SPECS = tuple(TensorSpec(f"weight{i}", (4, 8), "float32", fsdp_dim=0) for i in range(5))
TENSOR_BYTES = 4 * 8 * 4


class RefusingDisk(DiskStorage):
    """A folder that refuses the next so many files."""

    refusals: list[OSError]

    def at(self, folder: str) -> RefusingDisk:
        inside = RefusingDisk(self.path / folder)
        inside.refusals = self.refusals
        return inside

    @contextmanager
    def writing(self, name: str) -> Iterator[Any]:
        if self.refusals:
            raise self.refusals.pop(0)
        with super().writing(name) as out:
            yield out


class WritesParts:
    """All that the part writer needs of a program."""

    write_part = staticmethod(write_part)


def full_tensors() -> dict[str, torch.Tensor]:
    return {s.name: torch.full(s.shape, float(i)) for i, s in enumerate(SPECS)}


def written_part(folder: Path, *refusals: OSError) -> Event:
    """What a worker reports after its part of a state of five tensors."""
    run = RefusingDisk(folder)
    run.refusals = list(refusals)
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    program: Any = WritesParts()
    writer = PartWriter("w0", run, program, FaultInjector("w0"), events.put)
    tensors = {name: (Region.whole(t.shape), t) for name, t in full_tensors().items()}
    writer.begin(CheckpointPart(STEP, GENERATION, tensors))
    return events.get(timeout=LATE_S)


def test_refused_write_of_a_part_is_retried(tmp_path: Path) -> None:
    event = written_part(tmp_path, OSError("slow down"), OSError(errno.EIO, "I/O error"))
    assert isinstance(event, PartWritten)
    assert (tmp_path / folder_of(STEP, GENERATION) / event.file.name).exists()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES])
def test_write_that_would_fail_again_is_reported_at_once(tmp_path: Path, number: int) -> None:
    event = written_part(tmp_path, OSError(number, "no"))
    assert isinstance(event, PartFailed) and "no" in event.cause


def test_files_of_a_part_are_not_larger_than_allowed() -> None:
    tensors = {name: (Region.whole(t.shape), t) for name, t in full_tensors().items()}
    names = [list(file) for file in split_part(tensors, 2 * TENSOR_BYTES)]
    assert names == [["weight0", "weight1"], ["weight2", "weight3"], ["weight4"]]
    assert [list(file) for file in split_part(tensors, 1)] == [[name] for name in tensors]
    assert split_part({}, 1) == [{}], "a worker without regions reports a file, too"


def test_part_of_several_files_is_read_like_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(part_writer, "MAX_FILE_BYTES", 2 * TENSOR_BYTES)
    event = written_part(tmp_path)
    assert isinstance(event, PartWritten)
    files = [file for _, file in event.parts]
    names = ["part-w0.safetensors", "part-w0.1.safetensors", "part-w0.2.safetensors"]
    assert [file.name for file in files] == names
    url = publish(DiskStorage(tmp_path), STEP, GENERATION, files, Layout(), ("w0",))
    wanted = {spec.name: Region((1, 0), (2, 8)) for spec in SPECS}
    read = Checkpoint(DiskStorage(Path(url)), SPECS).read(wanted)
    assert all(torch.equal(read[name], t[1:3]) for name, t in full_tensors().items())
