"""A simulated worker: it handles commands as `actors/worker/worker.py` does."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial

from sim.control import Control, Interrupted, Raised, Surroundings
from sim.lineage import Part
from sim.timeline import Block, Body, GroupBroken, Thread
from sim.trainer import Trainer
from sim.writer import PartWriter

from elastic.protocol.commands import (
    Abort,
    Form,
    Order,
    Pause,
    RequestCheckpoint,
    Reshard,
    Resume,
    RollForward,
    SaveCheckpoint,
    SendRecords,
    StartSnapshots,
)
from elastic.protocol.events import WorkerRaised, WorkerReady
from elastic.replay.reattachment import Intake


class SimWorker:
    """One process: a control side that never blocks, a training thread, a writing thread."""

    def __init__(self, ready: WorkerReady, warm_up_s: float, around: Surroundings) -> None:
        self.name = ready.worker
        self.node = ready.node
        self.control = Control(self.name, around)
        self._writer = PartWriter(self.control)
        self._trainer = Trainer(self.control, self._writer)
        self._orders: deque[Order] = deque()
        self._intake = Intake()
        self._unread: list[Callable[[], None]] = []
        self.control.training = Thread(around.timeline, self._serve(ready, warm_up_s))

    @property
    def newest_generation(self) -> int:
        """The newest generation of any accepted order."""
        return self._intake.generation

    def meet(self, incarnation: int, committed_step: int) -> None:
        """Another controller has the run, and requests the reports that it may have missed."""
        if self.control.frozen:
            self._unread.append(partial(self.meet, incarnation, committed_step))
            return
        self._intake.meet(incarnation)
        self.control.repeat_reports(incarnation, committed_step)

    def take(self, incarnation: int, order: Order) -> None:
        """A command arrives: an abort acts at once, all else queues."""
        control = self.control
        if control.frozen:
            self._unread.append(partial(self.take, incarnation, order))
            return
        control.outbox.note(incarnation, order)
        if not self._intake.takes(incarnation, order):
            return
        if isinstance(order, Pause):
            control.pause_requested_generation = order.generation
            return
        if isinstance(order, RequestCheckpoint):
            control.save_request = (order.generation, order.step)
            return
        if isinstance(order, StartSnapshots):
            self._trainer.snapshots.obey(order)
            return
        if isinstance(order, SendRecords):
            self._trainer.send_records(order)
            return
        if isinstance(order, Abort):
            control.aborted_generation = max(control.aborted_generation, order.generation)
            control.interrupt_collective()
        self._orders.append(order)
        if control.training.waiting_on == "orders":
            control.training.wake(None, 0.0)

    def die(self) -> None:
        self.control.training.stop()
        self._writer.thread.stop()
        self.control.around.meetings.leave(self.name)

    def freeze(self) -> None:
        """Like SIGSTOP: nothing runs, nothing is answered."""
        self.control.frozen = True
        self.control.training.hold()
        self._writer.thread.hold()

    def thaw(self) -> None:
        """Like SIGCONT: handle everything that has arrived meanwhile."""
        self.control.frozen = False
        unread, self._unread = self._unread, []
        for read in unread:
            read()
        self.control.training.release()
        self._writer.thread.release()

    def hang(self) -> None:
        """Only the training thread hangs, and no abort reaches it."""
        self.control.training.stop()

    def holdings(self) -> list[Part]:
        """The parts that it has, unless an apply broke half-way."""
        stepper = self._trainer.stepper
        return [] if stepper and stepper.torn else list(self._trainer.holdings.values())

    def _serve(self, ready: WorkerReady, warm_up_s: float) -> Body:
        control = self.control
        yield warm_up_s
        try:
            yield from control.at("starting")
        except Raised as error:
            control.report(WorkerRaised(self.name, 0, error.kind, str(error)))
            return
        control.report(ready)
        yield from control.at("ready")
        while True:
            while not self._orders:
                yield Block("orders")
            order = self._orders.popleft()
            try:
                yield from self._obey(order)
            except Interrupted:
                continue  # the abort that caused it is in the queue
            except (GroupBroken, Raised) as error:
                control.around.meetings.leave(self.name)
                if isinstance(order, RollForward) or order.generation > control.aborted_generation:
                    kind = error.kind if isinstance(error, Raised) else "peer"
                    control.report(WorkerRaised(self.name, order.generation, kind, str(error)))

    def _obey(self, order: Order) -> Body:
        control, trainer = self.control, self._trainer
        if isinstance(order, Form | Reshard | Resume):
            control.running_generation = order.generation
            control.check()
        match order:
            case Form():
                yield from trainer.form(order)
            case Reshard():
                yield from trainer.reshard(order)
            case Resume():
                yield from trainer.train(order)
            case RollForward():
                yield from trainer.roll_forward(order)
            case SaveCheckpoint():
                yield from trainer.save(order)
            case Abort():
                control.deaf = False
                yield from trainer.quiesce(order)
