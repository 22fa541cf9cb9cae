"""The background writer of checkpoint parts keeps nothing of a part once it is written."""

from __future__ import annotations

import time
import weakref
from collections.abc import Mapping
from pathlib import Path

import torch

from actors.runtime.faults import FaultInjector
from actors.runtime.program import WrittenPart
from actors.storage.storage import Storage, open_storage
from actors.worker.part_writer import CheckpointPart, PartWriter
from elastic.geometry.regions import Region
from elastic.protocol.events import Event, PartWritten
from pipelines.training.checkpoint.part_file import write_part


class WritingProgram:
    """Writes parts as every program does, and trains nothing."""

    def write_part(
        self, checkpoint: Storage, name: str, parts: Mapping[str, tuple[Region, torch.Tensor]]
    ) -> WrittenPart:
        return write_part(checkpoint, name, parts)


def test_written_part_is_freed_although_no_apply_follows(tmp_path: Path) -> None:
    """As on a standby worker, which writes its part of the last step before it is released."""
    reports: list[Event] = []
    run = open_storage(str(tmp_path))
    writer = PartWriter("w0", run, WritingProgram(), FaultInjector("w0"), reports.append)  # type: ignore[arg-type]
    trained = torch.rand(1000)
    part = CheckpointPart(4, 1, {"weight": (Region((0,), (1000,)), trained)})
    references = [weakref.ref(part), weakref.ref(trained)]
    writer.begin(part)
    del part, trained
    writer.await_written(lambda: None)
    assert [type(report) for report in reports] == [PartWritten]
    deadline = time.monotonic() + 5.0
    while any(reference() is not None for reference in references):
        assert time.monotonic() < deadline, "the writer keeps the part"
        time.sleep(0.01)
    writer.await_copied()
