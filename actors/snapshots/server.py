"""The snapshot server: holds workers' snapshots in a process that no training failure can break.

Workers on its node get its memory through a Unix socket, and write and read there. Over TCP it
copies snapshots to other servers, or holds parities with them, and serves workers on other nodes.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from typing import Any

from actors.runtime.authenticated_server import AuthenticatedServer
from actors.runtime.handshake import connect_remote
from actors.runtime.network import ANYWHERE, BACKLOG, Network, listen
from actors.snapshots.buffer import NOT_WHOLE, NUM_VERSIONS, PEER_TIMEOUT_S, SnapshotBuffer, Version
from actors.snapshots.messages import (
    MalformedMessage,
    receive_into,
    receive_message,
    send_all,
    send_message,
)
from actors.snapshots.parity import ParityBuffer, receive_chunk, send_chunk
from elastic.protocol.snapshot_events import SnapshotServerReady, SnapshotServerReported
from elastic.reshard.snapshot_placement import ParitySlot, Slot, SnapshotServer


class SnapshotServerProcess:
    """Serves until its process ends; `snapshot_server` is its address."""

    def __init__(
        self,
        node: str,
        rack: str,
        host: str,
        secret: bytes,
        network: Network = ANYWHERE,
        max_snapshot_bytes: int | None = None,
    ) -> None:
        """Only processes that know `secret` are served. No snapshot or parity may exceed
        `max_snapshot_bytes`, the size of the whole state (None: no limit).

        Raises `UnsuitableMachine` if no port is free.
        """
        self._secret = secret
        self._max_snapshot_bytes = max_snapshot_bytes
        self._buffers: dict[tuple[str, int], SnapshotBuffer] = {}
        self._parities: dict[tuple[tuple[str, ...], str, int], ParityBuffer] = {}
        self._lock = threading.Lock()
        self._taken_bytes = self._received_bytes = 0
        local_listener = socket.socket(socket.AF_UNIX)
        name = f"elastic-snapshots-{uuid.uuid4().hex}"
        local_listener.bind(address_of(name))
        local_listener.listen(BACKLOG)
        tcp_listener = listen(host, network)
        port = tcp_listener.getsockname()[1]
        self.snapshot_server = SnapshotServer(node, rack, name, host, port)
        AuthenticatedServer((local_listener, tcp_listener), secret, self._serve)

    def report(self, generation: int) -> SnapshotServerReported:
        """Report the complete snapshots and parities, as the answer to a query of a generation."""
        with self._lock:
            buffers, parities = sorted(self._buffers.items()), sorted(self._parities.items())
        all_buffers = [buffer for _, buffer in buffers] + [parity.buffer for _, parity in parities]
        return SnapshotServerReported(
            self.snapshot_server.node,
            generation,
            tuple(Slot(w, g, step) for (w, g), buffer in buffers for step in buffer.steps()),
            self._taken_bytes,
            self._received_bytes,
            sum(NUM_VERSIONS * buffer.num_bytes for buffer in all_buffers),
            tuple(ParitySlot(*key, step) for key, p in parities for step in p.buffer.steps()),
        )

    def forget(self, generation: int, kept_generation: int = 0) -> None:
        """Free the snapshots of earlier generations, except those of `kept_generation`."""

        def is_kept(buffer_generation: int) -> bool:
            return buffer_generation >= generation or buffer_generation == kept_generation

        with self._lock:
            self._buffers = {key: b for key, b in self._buffers.items() if is_kept(key[1])}
            self._parities = {key: p for key, p in self._parities.items() if is_kept(key[2])}

    def _serve(self, connection: socket.socket) -> None:
        """Serve one connection until the other side closes it or fails."""
        actions: dict[str, Callable[[socket.socket, dict[str, Any]], None]] = {
            "room": self._share_buffer,
            "open": self._open,
            "taken": self._note_taken,
            "copy": self._copy,
            "put": self._put,
            "spread": self._spread,
            "fold": self._fold,
            "get": self._get,
        }
        if connection.family != socket.AF_UNIX:  # a dead machine does not close its connections
            connection.settimeout(PEER_TIMEOUT_S)
        try:
            while (message := receive_message(connection)) is not None:
                with _well_formed(message):
                    actions[message["do"]](connection, message)
        except MalformedMessage as error:
            print(f"the snapshot server closed a connection: {error}", file=sys.stderr)
        except OSError:
            return  # the other side sees the closed connection, and tries again

    def _find_whole(self, message: dict[str, Any]) -> Version | None:
        """The snapshot or parity that a message names, if it is complete here."""
        generation = message["generation"]
        with self._lock:
            if "members" in message and "worker" not in message:
                parity = self._parities.get((tuple(message["members"]), message["at"], generation))
                buffer = parity.buffer if parity else None
            else:
                buffer = self._buffers.get((message["worker"], generation))
        return buffer.version_of(message["step"]) if buffer else None

    def _buffer_for(self, message: dict[str, Any]) -> SnapshotBuffer:
        key = (message["worker"], message["generation"])
        self._refuse_large(message["num_bytes"])
        with self._lock:
            if key not in self._buffers or self._buffers[key].num_bytes != message["num_bytes"]:
                self._buffers[key] = SnapshotBuffer.new(message["num_bytes"])
            return self._buffers[key]

    def _refuse_large(self, num_bytes: int) -> None:
        """Raises ConnectionError for more bytes than any part of the state can have."""
        limit = self._max_snapshot_bytes
        if num_bytes < 0 or (limit is not None and num_bytes > limit):
            raise ConnectionError(f"a snapshot of {num_bytes} bytes: the whole state has {limit}")

    def _share_buffer(self, connection: socket.socket, message: dict[str, Any]) -> None:
        """Share the memory into which a worker on this node writes its snapshots."""
        buffer = self._buffer_for(message)
        socket.send_fds(connection, [b"!"], [version.fd for version in buffer.versions])

    def _note_taken(self, connection: socket.socket, message: dict[str, Any]) -> None:
        """A worker on this node has written a snapshot; answers whether it is complete here."""
        version = self._find_whole(message)
        if version is not None:
            with self._lock:
                self._taken_bytes += version.num_bytes
                self._drop_outdated(message["generation"], message["kept_step"])
        send_message(connection, is_whole=version is not None)

    def _drop_outdated(self, generation: int, kept_step: int) -> None:
        """Free the buffers of this generation that no worker fills any more.

        The snapshot placement has changed, and a newer step is complete everywhere.
        """

        def is_used(buffer_generation: int, buffer: SnapshotBuffer) -> bool:
            newest_step = max(buffer.steps(), default=kept_step)
            return buffer_generation != generation or newest_step >= kept_step

        self._buffers = {key: b for key, b in self._buffers.items() if is_used(key[1], b)}
        self._parities = {key: p for key, p in self._parities.items() if is_used(key[2], p.buffer)}

    def _open(self, connection: socket.socket, message: dict[str, Any]) -> None:
        """Share the memory of one complete snapshot with a worker on this node."""
        version = self._find_whole(message)
        if version is None:
            send_message(connection, num_bytes=NOT_WHOLE)
            return
        send_message(connection, num_bytes=version.num_bytes)
        socket.send_fds(connection, [b"!"], [version.fd])

    def _copy(self, connection: socket.socket, message: dict[str, Any]) -> None:
        """Copy a snapshot to another server; answers whether it is complete there."""
        version, is_whole = self._find_whole(message), False
        if version is not None:
            address = (message["host"], message["port"])
            with suppress(OSError), connect_remote(address, self._secret, PEER_TIMEOUT_S) as peer:
                is_whole = put_snapshot(peer, version, message)
        send_message(connection, is_whole=is_whole)

    def _put(self, connection: socket.socket, message: dict[str, Any]) -> None:
        """Receive a snapshot over the network. A connection that still sends an older one to the
        same buffer is shut."""
        buffer, step = self._buffer_for(message), message["step"]
        connection.settimeout(PEER_TIMEOUT_S)
        with self._lock:
            if step < buffer.claimed_step:
                raise ConnectionError("a newer snapshot is under way")
            buffer.claimed_step = step
            previous_writer, buffer.writer = buffer.writer, connection
        if previous_writer is not None:
            with suppress(OSError):
                previous_writer.shutdown(socket.SHUT_RDWR)
        with buffer.write_lock:
            if step < buffer.claimed_step:
                raise ConnectionError("a newer snapshot has come")
            version = buffer.version_to_overwrite(message["kept_step"])
            version.step = NOT_WHOLE
            receive_into(connection, version.memory)
            if receive_message(connection) != {"step": step}:
                raise ConnectionError("the snapshot was overwritten while it was sent")
            version.step = step
        self._acknowledge(connection, version.num_bytes)

    def _spread(self, connection: socket.socket, message: dict[str, Any]) -> None:
        """Send a snapshot's chunks to the other members of its set; answers whether all arrived."""
        version = self._find_whole(message)
        if version is None:
            send_message(connection, is_whole=False)
            return
        num_folded = 0
        for chunk in message["chunks"]:
            address = (chunk["host"], chunk["port"])
            with suppress(OSError), connect_remote(address, self._secret, PEER_TIMEOUT_S) as peer:
                num_folded += send_chunk(peer, version, message, chunk)
        send_message(connection, is_whole=num_folded == len(message["chunks"]))

    def _fold(self, connection: socket.socket, message: dict[str, Any]) -> None:
        """Fold a chunk of another member's snapshot into the parity."""
        members, at, num_bytes = tuple(message["members"]), message["at"], message["parity_bytes"]
        key = (members, at, message["generation"])
        self._refuse_large(num_bytes)
        self._refuse_large(message["num_bytes"])
        with self._lock:
            if key not in self._parities or self._parities[key].num_bytes != num_bytes:
                others = [member for member in members if member != at]
                self._parities[key] = ParityBuffer(others, num_bytes)
            parity = self._parities[key]
        received_bytes = receive_chunk(connection, parity, message)
        self._acknowledge(connection, received_bytes)

    def _acknowledge(self, connection: socket.socket, num_bytes: int) -> None:
        """Count received bytes, and confirm to the sender that all have arrived."""
        with self._lock:
            self._received_bytes += num_bytes
        send_message(connection, is_whole=True)

    def _get(self, connection: socket.socket, message: dict[str, Any]) -> None:
        """Send a snapshot, or a range of a snapshot or parity, to a worker on another node."""
        version = self._find_whole(message)
        if version is None:
            send_message(connection, num_bytes=NOT_WHOLE)
            return
        memory = version.memory[message.get("begin", 0) : message.get("end")]
        connection.settimeout(PEER_TIMEOUT_S)
        send_message(connection, num_bytes=len(memory))
        send_all(connection, memory)


def host_snapshot_server(
    pipe: Connection,
    node: str,
    rack: str,
    host: str,
    secret: bytes,
    network: Network = ANYWHERE,
    max_snapshot_bytes: int | None = None,
) -> None:
    """A child process's main function: serve, and answer through the pipe, until the parent is
    gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    server = SnapshotServerProcess(node, rack, host, secret, network, max_snapshot_bytes)
    pipe.send(SnapshotServerReady(server.snapshot_server))
    while True:
        try:
            message = pipe.recv()
        except EOFError:
            os._exit(0)
        if message == "probe":
            pipe.send(None)
            continue
        is_query, *generations = message
        if is_query:
            pipe.send(server.report(*generations))
        else:
            server.forget(*generations)


@contextmanager
def _well_formed(message: Mapping[str, Any]) -> Iterator[None]:
    """Raises `MalformedMessage` if a field is missing or has another type."""
    try:
        yield
    except (KeyError, TypeError, ValueError, IndexError, OverflowError) as error:
        text = f"{type(error).__name__}: {error}"
        raise MalformedMessage(f"a malformed message ({text}): {str(message)[:200]}") from error


def address_of(name: str) -> str:
    """The abstract address of a server's Unix socket: it has no file, and ends with its process."""
    return "\0" + name


def put_snapshot(peer: socket.socket, version: Version, request: Mapping[str, Any]) -> bool:
    """Send a snapshot to a server on another node; returns whether it is complete there.

    `request` has worker, generation and step, and the step that the server must keep. Raises
    OSError.
    """
    header = {key: request[key] for key in ("worker", "generation", "step", "kept_step")}
    send_message(peer, do="put", **header, num_bytes=version.num_bytes)
    send_all(peer, version.memory)
    if version.step != request["step"]:
        return False
    send_message(peer, step=request["step"])
    return bool((receive_message(peer) or {}).get("is_whole"))
