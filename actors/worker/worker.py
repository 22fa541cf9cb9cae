"""The worker: one training thread that executes commands, and a control side that never blocks.

The control side executes an abort at once; every other command queues for the training thread. If
an abort cannot wake the training thread, a substitute thread takes its place. Runs without Ray:
`take` accepts commands, `report` sends events.
"""

from __future__ import annotations

import gc
import os
import queue
import socket
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, assert_never
from zlib import crc32

import psutil
import torch

from actors.distributed.backends.torch_groups_private import groups_in_use
from actors.distributed.collectives import group_progress, progress_text
from actors.distributed.device_check import begin_device_check, kernel_on
from actors.distributed.groups import Formation
from actors.distributed.stall import StallDetector
from actors.distributed.torch_names import refuse_unknown_torch
from actors.health.checks import MachineCheck
from actors.runtime.factory import Factory
from actors.runtime.faults import FaultInjector
from actors.runtime.interruption import Interruption, SaveRequest
from actors.runtime.machine import flush_denormals, keep_freed_memory, peak_bytes, sample
from actors.runtime.network import choose_interface, listen_address
from actors.runtime.program import Program
from actors.storage.errors import DamagedCheckpoint, Interrupted
from actors.storage.storage import open_storage
from actors.worker.error_kinds import kind_of, wanted_of
from actors.worker.stack_traces import keep_stacks, position
from actors.worker.trainer import Trainer
from actors.worker.worker_options import Envelope, WorkerOptions
from elastic.geometry.machine_report import Peer
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
from elastic.protocol.events import (
    CheckpointDamaged,
    Event,
    HangObserved,
    WorkerDraining,
    WorkerRaised,
    WorkerReady,
)
from elastic.replay.reattachment import Intake

OBSERVE_LIMIT_S = 1.0
"""How long an abort waits for the observation of a hang."""
REPEAT_BREAK_S = 0.02
"""The pause between two passes of an abort: each breaks sockets opened during the one before."""


class Worker:
    """One process's worker. `start` returns at once; `WorkerReady` reports that it is warm."""

    def __init__(
        self,
        name: str,
        place: Place,
        program: Factory,
        options: WorkerOptions,
        report: Callable[[Event], None],
        store_host: str,
        peers: Sequence[Peer] = (),
    ) -> None:
        """`store_host` is the store's host, or another one that the same interface reaches. The
        worker measures its links to `peers` before it joins."""
        self.name = name
        self._store_host = store_host
        self._place = place
        self._peers = peers
        self._factory = program
        self._options = options
        self._report = report
        self._interruption = Interruption()
        self._orders: queue.Queue[Order | None] = queue.Queue()
        """None ends the training thread."""
        self.intake = Intake()
        self._quiesced_generation = 0
        self._program: Program | None = None
        self._trainer: Trainer | None = None
        self._kept: dict[int | None, object] = {}
        self._check_device: Callable[[], Exception | None] = lambda: None
        self._is_broken = False
        """Whether the device is broken: then this worker's state is lost, and it waits to be
        ended."""
        self._has_own_process = False
        """Whether nothing else runs in this process, whose objects may then be exempt from garbage
        collections."""
        self._thread = threading.Thread(target=self._serve, name="training", daemon=True)

    def sample(self, process: psutil.Process) -> dict[str, Any]:
        """A line of `system.jsonl` about this worker; `process` is the worker's own."""
        return sample(self.name, process, self._program.waits.data_s if self._program else 0.0)

    def start(self) -> None:
        """Begin to warm up, unless the worker has begun already."""
        if self._thread.ident is None:
            self._has_own_process = True
            self._thread.start()

    def serve(self) -> None:
        """Train on the calling thread until `end`, then forget the trained state."""
        self._thread = threading.current_thread()
        self._serve()
        if self._trainer is not None:
            self._trainer.forget_state()

    def end(self) -> None:
        """Let the training thread return after the commands that are queued."""
        self._orders.put(None)

    def take(self, envelope: Envelope) -> None:
        """Accept a command, unless an older controller sent it or the worker has it already."""
        order = envelope.order
        if not self.intake.takes(envelope.incarnation, order):
            return
        match order:
            case Abort():
                if order.is_hang:
                    observing = threading.Thread(
                        target=self._observe_hang, args=(order,), name="observer", daemon=True
                    )
                    observing.start()
                    observing.join(OBSERVE_LIMIT_S)  # the recorder of a hung NCCL may block
                self._interruption.aborted_generation = max(
                    self._interruption.aborted_generation, order.generation
                )
                self._orders.put(order)
                threading.Thread(target=self._abort_groups, args=(order.generation,)).start()
            case Pause():
                self._interruption.pause_requested_generation = order.generation
            case RequestCheckpoint():
                self._interruption.save_request = SaveRequest(order.generation, order.step)
            case StartSnapshots():
                assert self._trainer is not None
                self._trainer.snapshots.start_snapshots(order)
            case SendRecords():
                assert self._trainer is not None
                self._trainer.send_records(order)
            case _:
                self._orders.put(order)

    def _observe_hang(self, order: Abort) -> None:
        """Report and store where this worker is, before the abort moves it."""
        assert self._program and self._trainer and self._trainer.formation
        device_type = self._program.device.type
        groups = group_progress(device_type, self._trainer.formation.created_ns)
        self._report(HangObserved(self.name, order.generation, groups, position(self._thread)))
        text = f"{self.name} in generation {order.generation}: {order.cause}"
        run = open_storage(self._options.run_folder)
        keep_stacks(run, order.generation, self.name, f"{text}\n\n{progress_text(groups)}")

    def num_signs_of_life(self) -> int:
        """A count that grows while the training thread makes progress: the answer to a probe."""
        return self._interruption.num_signs_of_life

    def _serve(self) -> None:
        """The training thread: the only one that touches the model and torch.distributed."""
        flush_denormals()  # before torch starts its threads, which inherit the setting
        try:
            self._warm_up()
        except BaseException as error:  # the user's code may raise anything
            self.report_failure(0, error)
            return
        self._execute_all()

    def _execute_all(self) -> None:
        flush_denormals()
        while not self._interruption.is_abandoned():
            order = self._orders.get()
            if order is None:
                break
            try:
                self._execute(order)
            except Interrupted:
                pass  # the abort that caused it is in the queue
            except DamagedCheckpoint as error:
                assert isinstance(order, Reshard)
                generation, path = order.generation, order.path
                self._report(CheckpointDamaged(self.name, generation, path, str(error)))
            except BaseException as error:  # the user's code may raise anything, even `sys.exit()`
                self._handle_failure(order, error)
        self._interruption.forget()
        self._kept.pop(threading.get_ident(), None)

    def _handle_failure(self, order: Order, error: BaseException) -> None:
        """Report an error, unless an abort caused it. A broken device is always reported: its peers
        may have failed first, and no other process knows of it."""
        kind = kind_of(error)
        failure = self._check_device() if kind == "peer" else None
        if failure is not None:
            failure.__cause__ = error
            traceback.clear_frames(error.__traceback__)
            error, kind = failure, "device"
        self._is_broken = self._is_broken or kind == "device"
        is_collateral = order.generation <= self._interruption.aborted_generation
        if kind == "device" or isinstance(order, RollForward) or not is_collateral:
            self.report_failure(order.generation, error)

    def _warm_up(self) -> None:
        refuse_unknown_torch()
        choose_interface(self._options.network, self._store_host)
        self._program = program = self._factory.make()
        if self._has_own_process:
            gc.freeze()  # else each collection of the warm-up walks all that imports have created
        if program.device.type == "cpu":
            keep_freed_memory()
        faults = FaultInjector(self.name, self._options.faults)
        network, secret = self._options.network, self._options.secret
        host = listen_address(network, self._store_host) if self._has_own_process else ""
        check = MachineCheck(self._options.health, program.device, faults, host, network, secret)
        first = crc32(self.name.encode()) % max(1, len(self._peers))  # spreads the probes
        machine = check.run(self._place, [*self._peers[first:], *self._peers[:first]])
        program.warm_up()
        if program.device.type == "cuda":
            self._check_device = begin_device_check(partial(kernel_on, program.device)).failure
        self._trainer = Trainer(
            self.name, self._place.node, program, self._options, self._report, self._interruption
        )
        gc.collect()
        gc.freeze()  # no later collection has to walk the objects that imports created
        memory_bytes = None
        if program.device.type == "cuda":
            memory_bytes = torch.cuda.get_device_properties(program.device).total_memory
        figures = program.figures
        self._report(
            WorkerReady(
                self.name,
                self._place.node,
                os.getpid(),
                self._place.rack,
                memory_bytes=memory_bytes,
                digest=self._trainer.digest,
                device=program.device.type,
                device_name=figures.name,
                step_flops=figures.step_flops,
                peak_flops=figures.peak_flops,
                machine=machine,
            )
        )
        if self._has_own_process:
            check.watch(self._committed_step, self._report_device_error)

    def _committed_step(self) -> int:
        stepper = self._trainer.stepper if self._trainer else None
        return stepper.committed_step if stepper else 0

    def _report_device_error(self, error: str) -> None:
        self._report(WorkerDraining(self.name, error, is_degraded=True))

    def _execute(self, order: Order) -> None:
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
                    self._handle_failure(order, failure)
                if not self._is_broken:
                    trainer.quiesce(order)
            case Pause() | StartSnapshots() | SendRecords() | RequestCheckpoint():
                raise AssertionError("the control side executes this command: it never queues")
            case _:
                assert_never(order)

    def _abort_groups(self, generation: int) -> None:
        """Abort the groups again and again until the training thread has unwound. If that does not
        wake it, replace it by a substitute thread."""
        deadline = time.monotonic() + self._options.collective_timeout_s
        stall = StallDetector(self._thread)
        while self._quiesced_generation < generation and time.monotonic() < deadline:
            formation = self._trainer.formation if self._trainer else None
            if formation is not None:
                formation.abort()
                can_stay_blocked = formation.can_lose_wake_ups or stall.is_in_launch
                if can_stay_blocked and stall.lasts():
                    self._start_substitute(formation)
            time.sleep(REPEAT_BREAK_S)

    def _start_substitute(self, formation: Formation) -> None:
        """Let a substitute thread execute the commands, and keep the groups until the blocked
        thread ends: destroying a group waits for the operations under way in it."""
        ident = self._thread.ident
        assert ident is not None
        self._kept[ident] = (formation.transfer, groups_in_use())
        if not self._interruption.abandon(ident):
            del self._kept[ident]
            return
        self._thread = threading.Thread(target=self._execute_all, name="training", daemon=True)
        self._thread.start()

    def report_failure(self, generation: int, error: BaseException) -> None:
        """Report an error of this worker as `WorkerRaised`."""
        text = _printable("".join(traceback.format_exception(error)))
        message = _printable(f"{type(error).__name__}: {error}").splitlines()[0]
        kind = kind_of(error, has_abandoned_thread=bool(self._kept))
        if kind in ("machine", "health"):
            message = f"node {self._place.node} ({socket.gethostname()}): {error}"
            text = ""  # not a bug: no traceback
        if kind == "mistake":
            message, text = " ".join(_printable(str(error)).split()), ""
        held_bytes = peak_bytes() if kind == "memory" else 0
        wanted_bytes = wanted_of(error) if kind == "memory" else 0
        self._report(
            WorkerRaised(
                self.name,
                generation,
                kind,
                message,
                text,
                held_bytes,
                wanted_bytes,
                self._place.node,
            )
        )
        traceback.clear_frames(error.__traceback__)


def _printable(text: str) -> str:
    """The text without lone surrogates, which no encoding and no database accepts."""
    return text.encode("utf-8", "backslashreplace").decode()
