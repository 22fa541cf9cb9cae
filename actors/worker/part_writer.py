"""Background writer of a worker's checkpoint part.

The part is copied to host memory while the next step computes, and written while training goes on.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from actors.host_memory.host_copy import HostCopy
from actors.host_memory.host_ring import HostRing
from actors.runtime.faults import FaultInjector
from actors.runtime.program import Program
from actors.storage.checkpoint_files import folder_of, part_name
from actors.storage.storage import LASTING_ERRORS, Storage, retry
from elastic.geometry.regions import Region
from elastic.protocol.events import Event, PartFailed, PartFile, PartWritten

LOOK_EVERY_S = 0.005
RETRY_PATIENCE_S, MIN_TRIES = 30.0, 3
"""One refusal must not discard the parts of all workers."""
MAX_FILE_BYTES = 64 << 30
"""Arrow writes an object of S3 in at most 10,000 pieces of 10 MiB."""
PartTensors = dict[str, tuple[Region, Tensor]]


@dataclass
class CheckpointPart:
    """One worker's part of one checkpoint; until it is copied, the tensors are the trained ones."""

    step: int
    generation: int
    tensors: PartTensors
    ring: HostRing | None = None
    """As for `HostCopy`."""

    def __post_init__(self) -> None:
        self.host_copy = HostCopy([tensor for _, tensor in self.tensors.values()], self.ring)

    def copy(self) -> None:
        """Copy the tensors to host memory."""
        regions, trained = zip(*self.tensors.values(), strict=True) if self.tensors else ((), ())
        copied = zip(regions, self.host_copy.to_host(trained), strict=True)
        self.tensors = dict(zip(self.tensors, copied, strict=True))


class PartWriter:
    """Writes parts in the background, one after the other. Runs without Ray."""

    def __init__(
        self,
        worker: str,
        run: Storage,
        program: Program,
        faults: FaultInjector,
        report: Callable[[Event], None],
    ) -> None:
        self._faults = faults
        self._worker = worker
        self._run = run
        self._program = program
        self._report = report
        self._newest: HostCopy | None = None
        self.begun_step = 0
        self.begun_generation = 0
        """Step and generation of the newest part."""
        self._parts: queue.Queue[CheckpointPart] = queue.Queue()
        threading.Thread(target=self._serve, name="part-writer", daemon=True).start()

    @property
    def is_busy(self) -> bool:
        """Whether a part is not written yet."""
        return self._parts.unfinished_tasks > 0

    def begin(self, part: CheckpointPart) -> None:
        """Queue a part; called on the training thread. The tensors must not change until
        `await_copied` returns."""
        self._newest, self.begun_step = part.host_copy, part.step
        self.begun_generation = part.generation
        self._parts.put(part)

    def await_written(self, check: Callable[[], None]) -> None:
        """Wait until every part is durable or has failed; `check` may raise meanwhile."""
        while self.is_busy:
            check()
            time.sleep(LOOK_EVERY_S)

    def await_copied(self, check: Callable[[], None] = lambda: None) -> None:
        """Wait until the tensors may change: see `HostCopy.hold_changes`. `check` may raise
        meanwhile."""
        if self._newest is not None:
            while not self._newest.hold_changes(LOOK_EVERY_S):
                check()
            self._newest = None

    def _serve(self) -> None:
        while True:
            part = self._parts.get()
            label = (part.generation, part.step)
            try:
                part.copy()
                self._faults.at("writing", part.step)
                first, *others = self._write(part)
            except Exception as error:  # training goes on, and the controller reports the failure
                cause = str(error) if isinstance(error, OSError) else repr(error)
                self._report(PartFailed(self._worker, *label, cause))
            else:
                self._faults.at("written", part.step)
                more = tuple((self._worker, file) for file in others)
                self._report(PartWritten(self._worker, *label, first, more))
            finally:
                self._parts.task_done()
            del part  # frees its host memory

    def _write(self, part: CheckpointPart) -> list[PartFile]:
        checkpoint = self._run.at(folder_of(part.step, part.generation))
        files = []
        for number, tensors in enumerate(split_part(part.tensors, MAX_FILE_BYTES)):
            name = part_name(self._worker, number)
            write = partial(self._program.write_part, checkpoint, name, tensors)
            written = retry(write, RETRY_PATIENCE_S, MIN_TRIES, LASTING_ERRORS)
            files.append(PartFile(name, written.num_bytes, written.checksum, written.header_bytes))
        return files


def split_part(tensors: PartTensors, max_bytes: int) -> list[PartTensors]:
    """The tensors of each file of a part, in order. A tensor is not divided."""
    files: list[PartTensors] = [{}]
    num_bytes = 0
    for name, (region, tensor) in tensors.items():
        if files[-1] and num_bytes + tensor.nbytes > max_bytes:
            files.append({})
            num_bytes = 0
        files[-1][name] = region, tensor
        num_bytes += tensor.nbytes
    return files
