"""A worker: one training thread that obeys commands, and a control side that never blocks.

A training thread that an abort cannot wake is left behind, and another takes its place.
Runs without Ray: `report` is how events leave, `take` how commands come in. An abort acts from
the control side at once; all else queues for the training thread.
"""

from __future__ import annotations

import gc
import os
import queue
import socket
import threading
import time
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any, assert_never

import psutil
import torch

from actors.distributed.device_check import kernel_on, prove
from actors.distributed.groups import Formation
from actors.distributed.stall import StallDetector
from actors.distributed.torch_private import groups_in_use
from actors.runtime.factory import Factory
from actors.runtime.interruption import Interruption, SaveRequest
from actors.runtime.machine import drop_tiny_numbers, keep_freed_memory, peak_bytes, sample
from actors.runtime.network import choose_interface
from actors.runtime.program import Program
from actors.storage.errors import DamagedCheckpoint, Interrupted
from actors.storage.storage import open_storage
from actors.worker.error_kinds import kind_of, wanted_of
from actors.worker.stack_traces import keep_stacks
from actors.worker.trainer import Trainer
from actors.worker.worker_options import Envelope, WorkerOptions
from elastic.geometry.topology import Place
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
from elastic.protocol.events import CheckpointDamaged, Event, WorkerRaised, WorkerReady
from elastic.protocol.reattachment import Intake

REPEAT_BREAK_S = 0.02
"""Sockets that are born while an abort looks for them are found by the next look."""


class Worker:
    """One process' worker; `start` returns at once, `WorkerReady` tells when it is warm."""

    def __init__(
        self,
        name: str,
        place: Place,
        program: Factory,
        options: WorkerOptions,
        report: Callable[[Event], None],
        store_host: str,
    ) -> None:
        """`store_host` is where the store will be, or some host on the same way."""
        self.name = name
        self._store_host = store_host
        self._place = place
        self._factory = program
        self._options = options
        self._report = report
        self._interruption = Interruption()
        self._orders: queue.Queue[Order | None] = queue.Queue()
        """None is the end."""
        self.intake = Intake()
        self._quiesced_generation = 0
        self._trainer: Trainer | None = None
        self._kept: dict[int | None, object] = {}
        self._check_device: Callable[[], Exception | None] = lambda: None
        self._is_broken = False
        """Its device is: this worker waits for its end, and what it holds is lost."""
        self._thread = threading.Thread(target=self._serve, name="training", daemon=True)

    def sample(self, process: psutil.Process) -> dict[str, Any]:
        """A line of `system.jsonl` about this worker, whose process that is."""
        return sample(self.name, process)

    def start(self) -> None:
        """Begin to warm up, unless that has begun."""
        if self._thread.ident is None:
            self._thread.start()

    def serve(self) -> None:
        """As `start`, but on the calling thread, until `end`; what was trained is let go then."""
        self._thread = threading.current_thread()
        self._serve()
        if self._trainer is not None:
            self._trainer.forget_state()

    def end(self) -> None:
        """Have the training thread return once it has done what it was told before."""
        self._orders.put(None)

    def take(self, envelope: Envelope) -> None:
        """Accept a command, unless it is of an older controller, or has been taken before."""
        order = envelope.order
        if not self.intake.takes(envelope.incarnation, order):
            return
        match order:
            case Abort():
                if order.is_hang:
                    run = open_storage(self._options.run_folder)
                    keep_stacks(run, self.name, order.generation, order.cause)
                self._interruption.aborted_generation = max(
                    self._interruption.aborted_generation, order.generation
                )
                self._orders.put(order)
                threading.Thread(target=self._break_off, args=(order.generation,)).start()
            case Pause():
                self._interruption.pause_requested_generation = order.generation
            case RequestCheckpoint():
                self._interruption.save_request = SaveRequest(order.generation, order.step)
            case StartSnapshots():
                assert self._trainer is not None
                self._trainer.snapshots.protect(order)
            case SendRecords():
                assert self._trainer is not None
                self._trainer.send_records(order)
            case _:
                self._orders.put(order)

    def num_signs_of_life(self) -> int:
        """A count that grows while the training thread gets on: the answer to a probe."""
        return self._interruption.num_signs_of_life

    def _serve(self) -> None:
        """The training thread: the only one that touches the model and torch.distributed."""
        drop_tiny_numbers()  # before torch makes threads of its own, which take after this one
        try:
            self._warm_up()
        except BaseException as error:  # whatever the user's code raises
            self.tell(0, error)
            return
        self._obey_all()

    def _obey_all(self) -> None:
        drop_tiny_numbers()
        while not self._interruption.is_left():
            order = self._orders.get()
            if order is None:
                break
            try:
                self._obey(order)
            except Interrupted:
                pass  # the abort that asked for it stands in the queue
            except DamagedCheckpoint as error:
                assert isinstance(order, Reshard)
                told = (self.name, order.generation, order.path, str(error))
                self._report(CheckpointDamaged(*told))
            except BaseException as error:  # whatever the user's code raises, as `sys.exit()`
                self._take_failure(order, error)
        self._interruption.forget()
        self._kept.pop(threading.get_ident(), None)

    def _take_failure(self, order: Order, error: BaseException) -> None:
        """Report it, unless an abort has caused it. A broken device is reported in any case: its
        peers may have failed first, and nobody else can know."""
        kind = kind_of(error)
        failure = self._check_device() if kind == "peer" else None
        if failure is not None:
            failure.__cause__ = error
            traceback.clear_frames(error.__traceback__)
            error, kind = failure, "device"
        self._is_broken = self._is_broken or kind == "device"
        is_collateral = order.generation <= self._interruption.aborted_generation
        if kind == "device" or isinstance(order, RollForward) or not is_collateral:
            self.tell(order.generation, error)

    def _warm_up(self) -> None:
        choose_interface(self._options.network, self._store_host)
        program: Program = self._factory.make()
        if program.device.type == "cpu":
            keep_freed_memory()
        program.warm_up()
        if program.device.type == "cuda":
            self._check_device = prove(partial(kernel_on, program.device)).failure
        self._trainer = Trainer(
            self.name, self._place.node, program, self._options, self._report, self._interruption
        )
        gc.collect()
        gc.freeze()  # what imports left behind need not be walked at every generation's end
        memory_bytes = None
        if program.device.type == "cuda":
            memory_bytes = torch.cuda.get_device_properties(program.device).total_memory
        self._report(
            WorkerReady(
                self.name,
                self._place.node,
                os.getpid(),
                self._place.rack,
                memory_bytes=memory_bytes,
                digest=self._trainer.digest,
                device=program.device.type,
            )
        )

    def _obey(self, order: Order) -> None:
        trainer = self._trainer
        assert trainer is not None
        interruption = self._interruption
        if isinstance(order, Form | Reshard | Resume):
            interruption.running_generation = order.generation
            interruption.check()
        match order:
            case Form():
                trainer.form(order)
            case Reshard():
                trainer.reshard(order)
            case Resume():
                trainer.train(order)
            case RollForward():
                trainer.roll_forward(order)
            case SaveCheckpoint():
                trainer.save(order)
            case Abort():
                self._quiesced_generation = order.generation
                if failure := self._check_device():
                    self._take_failure(order, failure)
                if not self._is_broken:
                    trainer.quiesce(order)
            case Pause() | StartSnapshots() | SendRecords() | RequestCheckpoint():
                raise AssertionError("this never queues")
            case _:
                assert_never(order)

    def _break_off(self, generation: int) -> None:
        """Break the groups again and again until the training thread has unwound, or wherever
        Gloo does not wake it, until another has taken its place."""
        deadline = time.monotonic() + self._options.collective_timeout_s
        standstill = StallDetector(self._thread)
        while self._quiesced_generation < generation and time.monotonic() < deadline:
            formation = self._trainer.formation if self._trainer else None
            if formation is not None:
                formation.break_off()
                if formation.can_lose_wake_ups and standstill.lasts():
                    self._leave_behind(formation)
            time.sleep(REPEAT_BREAK_S)

    def _leave_behind(self, formation: Formation) -> None:
        """Have another thread obey, and keep the groups until the one that waits in them ends:
        the end of a group waits for what is under way in it."""
        ident = self._thread.ident
        assert ident is not None
        self._kept[ident] = (formation.transfer, groups_in_use())
        if not self._interruption.leave(ident):
            del self._kept[ident]
            return
        self._thread = threading.Thread(target=self._obey_all, name="training", daemon=True)
        self._thread.start()

    def tell(self, generation: int, error: BaseException) -> None:
        """Report what broke here."""
        text = _printable("".join(traceback.format_exception(error)))
        message = _printable(f"{type(error).__name__}: {error}").splitlines()[0]
        kind = kind_of(error)
        if kind == "machine":
            message = f"node {self._place.node} ({socket.gethostname()}): {error}"
            text = ""  # it is no bug
        held_bytes = peak_bytes() if kind == "memory" else 0
        wanted_bytes = wanted_of(error) if kind == "memory" else 0
        self._report(
            WorkerRaised(self.name, generation, kind, message, text, held_bytes, wanted_bytes)
        )
        traceback.clear_frames(error.__traceback__)


def _printable(text: str) -> str:
    """The text without lone surrogates, which no encoding and no database takes."""
    return text.encode("utf-8", "backslashreplace").decode()
