"""Sending one worker's snapshots to the servers that a `StartSnapshots` command names."""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from torch import Tensor

from actors.host_memory.host_copy import CopyStopped, HostCopy
from actors.host_memory.host_ring import HostRing
from actors.runtime.faults import FaultInjector
from actors.runtime.handshake import connect_local, connect_remote
from actors.snapshots.buffer import NOT_WHOLE, NUM_VERSIONS, PEER_TIMEOUT_S, SnapshotBuffer, Version
from actors.snapshots.memory_layout import MemoryLayout
from actors.snapshots.messages import receive_message, send_message
from actors.snapshots.parity import parity_request
from actors.snapshots.server import put_snapshot
from elastic.geometry.assignment import Assignment
from elastic.protocol.commands import StartSnapshots
from elastic.reshard.snapshot_placement import SnapshotServer


@dataclass
class PendingSnapshot:
    """A snapshot under way."""

    step: int
    kept_step: int
    assignment: Assignment
    tensors: Mapping[str, Tensor]
    ring: HostRing | None = None
    """As for `HostCopy`."""
    done: threading.Event = field(default_factory=threading.Event)
    is_whole: bool = False
    copied_s: float = 0.0
    """How long it took to become whole."""
    error: Exception | None = None

    def __post_init__(self) -> None:
        self._began_s = time.perf_counter()
        self._beginning = threading.Lock()
        self._is_cancelled = self._has_begun = False
        self._copy = HostCopy(self.tensors.values(), self.ring)

    def copy_to(self, places: Mapping[str, Tensor]) -> bool:
        """Copy the tensors, unless the copy is cancelled; returns whether they were copied."""
        with self._beginning:
            self._has_begun = not self._is_cancelled
        if not self._has_begun:
            return False
        try:
            self._copy.run([(self.tensors[name], place) for name, place in places.items()])
        except CopyStopped:
            return False
        return True

    def await_copied(self) -> None:
        """Called before the tensors change: see `HostCopy.hold_changes`. Cancels the copy if it has
        not begun."""
        with self._beginning:
            self._is_cancelled = not self._has_begun
        if not self._is_cancelled:
            self._copy.hold_changes()

    def note_whole(self) -> None:
        """The snapshot is complete at all servers."""
        self.copied_s = time.perf_counter() - self._began_s
        self.is_whole = True

    def stop(self) -> None:
        """Break off the copy: the snapshot will not be complete."""
        self._copy.stop()


class Sink:
    """Sends one snapshot after the other, in its own thread.

    A snapshot goes through shared memory to the server on this node, which passes it on, whole or
    in chunks, to the other servers.
    """

    def __init__(
        self,
        order: StartSnapshots,
        worker: str,
        node: str,
        layout: MemoryLayout,
        set_sizes: Sequence[int],
        faults: FaultInjector,
        secret: bytes,
    ) -> None:
        """`set_sizes` are of the parts of the worker's parity set; empty if it is in none."""
        self.order = order
        self._faults = faults
        self._secret = secret
        self._parity = parity_request(order, worker, set_sizes) if set_sizes else None
        self.snapshot_servers: tuple[SnapshotServer, ...] = order.snapshot_servers[
            order.workers.index(worker)
        ]
        self._worker = worker
        self._layout = layout
        self._has_local = bool(self.snapshot_servers) and self.snapshot_servers[0].node == node
        self._others = self.snapshot_servers[1:] if self._has_local else self.snapshot_servers
        self._local: socket.socket | None = None
        """The connection to the server on this node."""
        self._sockets: set[socket.socket] = set()
        self._buffer: SnapshotBuffer | None = None
        self._pending: queue.SimpleQueue[PendingSnapshot | None] = queue.SimpleQueue()
        threading.Thread(target=self._send_all, name="snapshots", daemon=True).start()

    def begin(self, snapshot: PendingSnapshot) -> None:
        self._pending.put(snapshot)

    def close(self) -> None:
        """Break off the snapshot under way, and end the thread."""
        self._pending.put(None)
        for sock in tuple(self._sockets):
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def _send_all(self) -> None:
        while (snapshot := self._pending.get()) is not None:
            try:
                if self._send(snapshot):
                    snapshot.note_whole()
            except OSError:
                pass  # a server is gone: the snapshot is incomplete; the controller notices
            except Exception as error:
                snapshot.error = error  # `await_whole` raises it
            snapshot.done.set()
            del snapshot  # and with it the tensors of its step
        for sock in self._sockets:
            sock.close()

    def _send(self, snapshot: PendingSnapshot) -> bool:
        """Copy to host memory (the local server's, if there is one), then to the other servers.

        Returns whether the snapshot is complete at all servers. Raises OSError if the local server
        is gone.
        """
        buffer = self._buffer = self._buffer or self._open_buffer()
        version = buffer.version_to_overwrite(snapshot.kept_step)
        version.step = NOT_WHOLE
        if not snapshot.copy_to(self._layout.tensors(version.memory)):
            return False
        version.step = snapshot.step
        self._faults.at("snapshot", snapshot.step)
        is_taken = self._local is None or self._request("taken", snapshot)
        if is_taken and self._parity:
            is_taken = self._request("spread", snapshot, **self._parity)
        return is_taken and all([self._pass_on(s, snapshot, version) for s in self._others])  # noqa: C419 (send to each)

    def _open_buffer(self) -> SnapshotBuffer:
        if not self._has_local:
            return SnapshotBuffer.new(self._layout.num_bytes)
        local = connect_local(self.snapshot_servers[0].socket, self._secret, PEER_TIMEOUT_S)
        self._sockets.add(local)
        send_message(
            local,
            do="room",
            worker=self._worker,
            generation=self.order.generation,
            num_bytes=self._layout.num_bytes,
        )
        _, fds, *_ = socket.recv_fds(local, 1, NUM_VERSIONS)
        if len(fds) < NUM_VERSIONS:
            raise ConnectionError("the snapshot server closed the connection")
        local.settimeout(None)  # copying to another node has no time limit here
        self._local = local
        return SnapshotBuffer(fds, self._layout.num_bytes)

    def _pass_on(
        self, snapshot_server: SnapshotServer, snapshot: PendingSnapshot, version: Version
    ) -> bool:
        """Copy to another server: by the local server, in its own process, else from here."""
        host, port = snapshot_server.host, snapshot_server.port
        if self._local is not None:
            return self._request("copy", snapshot, host=host, port=port)
        with suppress(OSError), connect_remote((host, port), self._secret, PEER_TIMEOUT_S) as peer:
            self._sockets.add(peer)
            try:
                return put_snapshot(peer, version, self._fields(snapshot))
            finally:
                self._sockets.discard(peer)
        return False

    def _request(self, action: str, snapshot: PendingSnapshot, **more: object) -> bool:
        """Have the local server do something with a snapshot; returns whether it succeeded."""
        assert self._local is not None
        send_message(self._local, do=action, **self._fields(snapshot), **more)
        return bool((receive_message(self._local) or {}).get("is_whole"))

    def _fields(self, snapshot: PendingSnapshot) -> dict[str, object]:
        return {
            "worker": self._worker,
            "generation": self.order.generation,
            "step": snapshot.step,
            "kept_step": snapshot.kept_step,
        }
