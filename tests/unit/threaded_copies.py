"""A copy engine without a GPU: streams that are threads, and copies that take their time.

Tensors that stand for device memory are those given to `on_device`. Work runs in the order of its
stream, events order streams, and no method blocks: as CUDA has it.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from actors.host_memory.copy_engine import CopyEvent

TIMEOUT_S = 20.0


class ThreadEvent:
    """Complete once the thread of its stream has come to it."""

    def __init__(self) -> None:
        self.is_complete = threading.Event()

    def synchronize(self) -> None:
        assert self.is_complete.wait(TIMEOUT_S), "the stream does not get to this event"


class ThreadStream:
    """A stream of work, done by one thread."""

    def __init__(self, name: str) -> None:
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.thread.start()

    def submit(self, work: Callable[[], None]) -> None:
        self._work.put(work)

    def record(self) -> ThreadEvent:
        event = ThreadEvent()
        self.submit(event.is_complete.set)
        return event

    def wait_for(self, event: CopyEvent) -> None:
        self.submit(event.synchronize)

    def close(self) -> None:
        self._work.put(None)
        self.thread.join(TIMEOUT_S)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()


class ThreadedEngine:
    """Copies on one thread, next to a compute stream on another."""

    def __init__(self, copy_s: float) -> None:
        self.copy_s = copy_s
        """The time that each copy takes, half of it before it reads."""
        self.compute = ThreadStream("compute")
        self.copies = ThreadStream("copies")
        self.num_allocated = 0
        self.num_copies = 0
        self.fails_at = 0
        """The number of the copy, from 1, that cannot be issued; 0: none."""
        self._device: list[Tensor] = []

    def on_device(self, tensor: Tensor) -> Tensor:
        self._device.append(tensor)
        return tensor

    def owns(self, tensor: Tensor) -> bool:
        return any(tensor is owned for owned in self._device)

    def allocate(self, num_bytes: int) -> Tensor:
        self.num_allocated += 1
        return torch.full((num_bytes,), 0xEE, dtype=torch.uint8)

    def record_compute(self) -> ThreadEvent:
        return self.compute.record()

    def wait_for_compute(self, event: CopyEvent) -> None:
        self.copies.wait_for(event)

    def copy(self, target: Tensor, source: Tensor) -> None:
        self.num_copies += 1
        if self.num_copies == self.fails_at:
            raise RuntimeError("this copy cannot be issued")

        def copy() -> None:
            time.sleep(self.copy_s / 2)
            target.copy_(source)
            time.sleep(self.copy_s / 2)

        self.copies.submit(copy)

    def record_copies(self) -> ThreadEvent:
        return self.copies.record()

    def hold_compute(self, event: CopyEvent) -> None:
        self.compute.wait_for(event)


@contextmanager
def threaded_engine(copy_s: float = 0.005) -> Iterator[ThreadedEngine]:
    engine = ThreadedEngine(copy_s)
    try:
        yield engine
    finally:
        engine.compute.close()
        engine.copies.close()
