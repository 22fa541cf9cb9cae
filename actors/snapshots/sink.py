"""The way of one worker's snapshots to the keepers that one `StartSnapshots` names."""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from torch import Tensor

from actors.runtime.faults import FaultInjector
from actors.runtime.handshake import connect_afar, connect_beside
from actors.snapshots.buffer import NOT_WHOLE, NUM_VERSIONS, PEER_TIMEOUT_S, SnapshotBuffer, Version
from actors.snapshots.memory_layout import MemoryLayout
from actors.snapshots.messages import hear, tell
from actors.snapshots.parity import spreading
from actors.snapshots.server import put_snapshot
from actors.snapshots.side_stream import SideStream
from elastic.geometry.assignment import Assignment
from elastic.protocol.commands import StartSnapshots
from elastic.reshard.snapshot_placement import SnapshotServer


@dataclass
class Taking:
    """A snapshot under way."""

    step: int
    kept_step: int
    assignment: Assignment
    tensors: Mapping[str, Tensor]
    done: threading.Event = field(default_factory=threading.Event)
    is_whole: bool = False
    error: Exception | None = None

    def __post_init__(self) -> None:
        self._copied = threading.Event()
        self._beginning = threading.Lock()
        self._is_cancelled = self._has_begun = False
        self._stream = SideStream(self.tensors.values())

    def copy_to(self, places: Mapping[str, Tensor]) -> bool:
        """Copy the tensors, unless they may have changed by now."""
        with self._beginning:
            self._has_begun = not self._is_cancelled
        try:
            if self._has_begun:
                with self._stream.copying():
                    for name, place in places.items():
                        place.copy_(self.tensors[name].detach())
        finally:
            self._copied.set()
        return self._has_begun

    def roll_forward(self) -> None:
        """Wait until the tensors have been copied; if that has not begun, it will not."""
        with self._beginning:
            self._is_cancelled = not self._has_begun
        if not self._is_cancelled:
            self._copied.wait()


class Sink:
    """Brings one snapshot after the other in a thread of its own, to the keeper beside this worker
    through memory, and by that one, whole or in chunks, to the others."""

    def __init__(
        self,
        order: StartSnapshots,
        worker: str,
        node: str,
        plan: MemoryLayout,
        set_sizes: Sequence[int],
        faults: FaultInjector,
        secret: bytes,
    ) -> None:
        """`set_sizes` are of the parts of the worker's set, none if it is in no set."""
        self.order = order
        self._faults = faults
        self._secret = secret
        self._parity = spreading(order, worker, set_sizes) if set_sizes else None
        self.snapshot_servers: tuple[SnapshotServer, ...] = order.snapshot_servers[
            order.workers.index(worker)
        ]
        self._worker = worker
        self._plan = plan
        self._is_beside = bool(self.snapshot_servers) and self.snapshot_servers[0].node == node
        self._others = self.snapshot_servers[1:] if self._is_beside else self.snapshot_servers
        self._beside: socket.socket | None = None
        self._sockets: set[socket.socket] = set()
        self._room: SnapshotBuffer | None = None
        self._takings: queue.SimpleQueue[Taking | None] = queue.SimpleQueue()
        threading.Thread(target=self._serve, name="snapshots", daemon=True).start()

    def begin(self, taking: Taking) -> None:
        self._takings.put(taking)

    def close(self) -> None:
        """Break off what is under way, and end the thread."""
        self._takings.put(None)
        for sock in tuple(self._sockets):
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def _serve(self) -> None:
        while (taking := self._takings.get()) is not None:
            try:
                taking.is_whole = self._bring(taking)
            except OSError:
                pass  # a keeper is gone: it is not whole, and the controller learns by itself
            except Exception as error:
                taking.error = error  # raised where it is awaited
            taking.done.set()
            del taking  # and with it the tensors of its step
        for sock in self._sockets:
            sock.close()

    def _bring(self, taking: Taking) -> bool:
        """Copy to host memory, that of the keeper beside if there is one, then to the others;
        whether it is whole at all of them. Raises OSError if the one beside is gone."""
        room = self._room = self._room or self._make_room()
        version = room.spare(taking.kept_step)
        version.step = NOT_WHOLE
        if not taking.copy_to(self._plan.tensors(version.memory)):
            return False
        version.step = taking.step
        self._faults.at("snapshot", taking.step)
        is_taken = self._beside is None or self._asked("taken", taking)
        if is_taken and self._parity:
            is_taken = self._asked("spread", taking, **self._parity)
        return is_taken and all([self._pass_on(k, taking, version) for k in self._others])  # noqa: C419 (each is to have it)

    def _make_room(self) -> SnapshotBuffer:
        if not self._is_beside:
            return SnapshotBuffer.new(self._plan.num_bytes)
        beside = connect_beside(self.snapshot_servers[0].socket, self._secret, PEER_TIMEOUT_S)
        self._sockets.add(beside)
        tell(
            beside,
            do="room",
            worker=self._worker,
            generation=self.order.generation,
            num_bytes=self._plan.num_bytes,
        )
        _, fds, *_ = socket.recv_fds(beside, 1, NUM_VERSIONS)
        if len(fds) < NUM_VERSIONS:
            raise ConnectionError("the keeper hung up")
        beside.settimeout(None)  # to copy to another node takes what it takes
        self._beside = beside
        return SnapshotBuffer(fds, self._plan.num_bytes)

    def _pass_on(self, snapshot_server: SnapshotServer, taking: Taking, version: Version) -> bool:
        """By the keeper beside, which has a heap of its own, else from here."""
        if self._beside is not None:
            return self._asked("copy", taking, host=snapshot_server.host, port=snapshot_server.port)
        address = (snapshot_server.host, snapshot_server.port)
        with suppress(OSError), connect_afar(address, self._secret, PEER_TIMEOUT_S) as peer:
            self._sockets.add(peer)
            try:
                return put_snapshot(peer, version, self._named(taking))
            finally:
                self._sockets.discard(peer)
        return False

    def _asked(self, what: str, taking: Taking, **more: object) -> bool:
        """Have the keeper beside do something with a snapshot; whether that has succeeded."""
        assert self._beside is not None
        tell(self._beside, do=what, **self._named(taking), **more)
        return bool((hear(self._beside) or {}).get("is_whole"))

    def _named(self, taking: Taking) -> dict[str, object]:
        generation = self.order.generation
        return {
            "worker": self._worker,
            "generation": generation,
            "step": taking.step,
            "kept_step": taking.kept_step,
        }
