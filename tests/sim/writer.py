"""A simulated worker's second thread: it writes checkpoint parts beside training."""

from __future__ import annotations

from collections import deque

from sim.control import Control
from sim.storage import Written
from sim.timeline import Block, Body, Thread

from elastic.protocol.events import PartFailed, PartWritten


class PartWriter:
    """Writes parts one after the other."""

    def __init__(self, control: Control) -> None:
        self._control = control
        self._parts: deque[tuple[int, int, Written]] = deque()
        self.begun_step = self.begun_generation = 0
        self._writes = False
        self.thread = Thread(control.around.timeline, self._serve())

    def write(self, step: int, generation: int, part: Written) -> None:
        self.begun_step, self.begun_generation = step, generation
        self._parts.append((step, generation, part))
        if self.thread.waiting_on == "parts":
            self.thread.wake(None, 0.0)

    @property
    def is_busy(self) -> bool:
        return bool(self._parts) or self._writes

    def _serve(self) -> Body:
        control = self._control
        name, around, file = control.name, control.around, f"part-{control.name}"
        while True:
            while not self._parts:
                yield Block("parts")
            step, generation, part = self._parts.popleft()
            self._writes = True
            yield around.draw(0.01, 0.1)
            around.at(name, "writing")
            if self.thread.ended:
                return
            yield 0.0
            if control.write_hangs:
                yield Block("storage")
            if control.disk_full:
                control.disk_full = False
                control.report(PartFailed(name, generation, step, "no space left"))
            else:
                around.storage.write(step, generation, file, part)
                control.report(PartWritten(name, generation, step, part.named(file)))
            self._writes = False
