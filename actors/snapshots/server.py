"""A keeper: keeps snapshots of workers in a process that no training can break; runs without Ray.

Workers beside it get the memory itself, through a socket of that machine, and write and read there.
It copies to other keepers, or keeps parities with them, and gives to workers elsewhere, over TCP.
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
from actors.runtime.handshake import connect_afar
from actors.runtime.network import ANYWHERE, BACKLOG, Network, listen
from actors.snapshots.buffer import NOT_WHOLE, NUM_VERSIONS, PEER_TIMEOUT_S, SnapshotBuffer, Version
from actors.snapshots.messages import MalformedMessage, hear, receive_into, send_all, tell
from actors.snapshots.parity import ParityBuffer, send_chunk, take_chunk
from elastic.protocol.events import SnapshotServerReady, SnapshotServerReported
from elastic.reshard.snapshot_placement import ParitySlot, Slot, SnapshotServer


class SnapshotHost:
    """Serves until its process ends; `keeper` is how to reach it."""

    def __init__(
        self,
        node: str,
        rack: str,
        host: str,
        secret: bytes,
        network: Network = ANYWHERE,
        max_snapshot_bytes: int | None = None,
    ) -> None:
        """Only who knows `secret` is served. No snapshot or parity may take more than
        `max_snapshot_bytes`, which is what the whole state would take (None: no limit).

        Raises `UnfitMachine` if there is no port to listen on.
        """
        self._secret = secret
        self._max_snapshot_bytes = max_snapshot_bytes
        self._rooms: dict[tuple[str, int], SnapshotBuffer] = {}
        self._parities: dict[tuple[tuple[str, ...], str, int], ParityBuffer] = {}
        self._lock = threading.Lock()
        self._taken_bytes = self._received_bytes = 0
        beside = socket.socket(socket.AF_UNIX)
        name = f"elastic-keeper-{uuid.uuid4().hex}"
        beside.bind(address_of(name))
        beside.listen(BACKLOG)
        afar = listen(host, network)
        self.snapshot_server = SnapshotServer(node, rack, name, host, afar.getsockname()[1])
        AuthenticatedServer((beside, afar), secret, self._serve)

    def told(self, generation: int) -> SnapshotServerReported:
        """Which whole snapshots there are, as an answer to who asks in a generation."""
        with self._lock:
            rooms, parities = sorted(self._rooms.items()), sorted(self._parities.items())
        all_rooms = [room for _, room in rooms] + [parity.room for _, parity in parities]
        return SnapshotServerReported(
            self.snapshot_server.node,
            generation,
            tuple(Slot(w, g, step) for (w, g), room in rooms for step in room.steps()),
            self._taken_bytes,
            self._received_bytes,
            sum(NUM_VERSIONS * room.num_bytes for room in all_rooms),
            tuple(ParitySlot(*key, step) for key, p in parities for step in p.room.steps()),
        )

    def forget(self, generation: int) -> None:
        """Free what was taken before this generation."""
        with self._lock:
            self._rooms = {key: r for key, r in self._rooms.items() if key[1] >= generation}
            self._parities = {key: p for key, p in self._parities.items() if key[2] >= generation}

    def _serve(self, connection: socket.socket) -> None:
        """One connection, until the other side hangs up or breaks off."""
        doings: dict[str, Callable[[socket.socket, dict[str, Any]], None]] = {
            "room": self._give_room,
            "open": self._open,
            "taken": self._note_taken,
            "copy": self._copy,
            "put": self._put,
            "spread": self._spread,
            "fold": self._fold,
            "get": self._get,
        }
        if connection.family != socket.AF_UNIX:  # a machine that is gone does not hang up
            connection.settimeout(PEER_TIMEOUT_S)
        try:
            while (message := hear(connection)) is not None:
                with _well_formed(message):
                    doings[message["do"]](connection, message)
        except MalformedMessage as error:
            print(f"a snapshot server hung up on {error}", file=sys.stderr)
        except OSError:
            return  # the other side learns from the end of the connection, and tries again

    def _whole(self, message: dict[str, Any]) -> Version | None:
        """The snapshot that a message names, or the parity, if it is whole here."""
        generation = message["generation"]
        with self._lock:
            if "members" in message and "worker" not in message:
                parity = self._parities.get((tuple(message["members"]), message["at"], generation))
                room = parity.room if parity else None
            else:
                room = self._rooms.get((message["worker"], generation))
        return room.of(message["step"]) if room else None

    def _make_room(self, message: dict[str, Any]) -> SnapshotBuffer:
        key = (message["worker"], message["generation"])
        self._refuse_large(message["num_bytes"])
        with self._lock:
            if key not in self._rooms or self._rooms[key].num_bytes != message["num_bytes"]:
                self._rooms[key] = SnapshotBuffer.new(message["num_bytes"])
            return self._rooms[key]

    def _refuse_large(self, num_bytes: int) -> None:
        """Raises ConnectionError for more than any part of the state can take."""
        most = self._max_snapshot_bytes
        if num_bytes < 0 or (most is not None and num_bytes > most):
            raise ConnectionError(f"a snapshot of {num_bytes} bytes: the whole state has {most}")

    def _give_room(self, connection: socket.socket, message: dict[str, Any]) -> None:
        """The memory in which a worker beside this keeper writes its snapshots itself."""
        room = self._make_room(message)
        socket.send_fds(connection, [b"!"], [version.fd for version in room.versions])

    def _note_taken(self, connection: socket.socket, message: dict[str, Any]) -> None:
        """A worker beside this keeper has written a snapshot; tells whether it is whole here."""
        version = self._whole(message)
        if version is not None:
            with self._lock:
                self._taken_bytes += version.num_bytes
                self._drop_outdated(message["generation"], message["kept_step"])
        tell(connection, is_whole=version is not None)

    def _drop_outdated(self, generation: int, kept_step: int) -> None:
        """Free the rooms of this generation that nobody fills any more since snapshots go other
        ways: what is older than what is whole everywhere is of no use."""

        def is_used(of: int, room: SnapshotBuffer) -> bool:
            return of != generation or max(room.steps(), default=kept_step) >= kept_step

        self._rooms = {key: r for key, r in self._rooms.items() if is_used(key[1], r)}
        self._parities = {key: p for key, p in self._parities.items() if is_used(key[2], p.room)}

    def _open(self, connection: socket.socket, message: dict[str, Any]) -> None:
        """The memory of one whole snapshot, for a worker beside this keeper to read."""
        version = self._whole(message)
        if version is None:
            tell(connection, num_bytes=NOT_WHOLE)
            return
        tell(connection, num_bytes=version.num_bytes)
        socket.send_fds(connection, [b"!"], [version.fd])

    def _copy(self, connection: socket.socket, message: dict[str, Any]) -> None:
        """Copy a snapshot to another keeper; tells whether it is whole there."""
        version, is_whole = self._whole(message), False
        if version is not None:
            address = (message["host"], message["port"])
            with suppress(OSError), connect_afar(address, self._secret, PEER_TIMEOUT_S) as peer:
                is_whole = put_snapshot(peer, version, message)
        tell(connection, is_whole=is_whole)

    def _put(self, connection: socket.socket, message: dict[str, Any]) -> None:
        """Take a snapshot that comes over the network; whoever still sends an older one to the
        same room is broken off."""
        room, step = self._make_room(message), message["step"]
        connection.settimeout(PEER_TIMEOUT_S)
        with self._lock:
            if step < room.claimed_step:
                raise ConnectionError("a newer one is under way")
            room.claimed_step = step
            before, room.writer = room.writer, connection
        if before is not None:
            with suppress(OSError):
                before.shutdown(socket.SHUT_RDWR)
        with room.turn:
            if step < room.claimed_step:
                raise ConnectionError("a newer one has come")
            version = room.spare(message["kept_step"])
            version.step = NOT_WHOLE
            receive_into(connection, version.memory)
            if hear(connection) != {"step": step}:
                raise ConnectionError("it was written over while it was sent")
            version.step = step
        with self._lock:
            self._received_bytes += version.num_bytes
        tell(connection, is_whole=True)

    def _spread(self, connection: socket.socket, message: dict[str, Any]) -> None:
        """Send a snapshot's chunks to the others of its set; tells whether all have got theirs."""
        version = self._whole(message)
        if version is None:
            tell(connection, is_whole=False)
            return
        num_taken = 0
        for chunk in message["chunks"]:
            address = (chunk["host"], chunk["port"])
            with suppress(OSError), connect_afar(address, self._secret, PEER_TIMEOUT_S) as peer:
                num_taken += send_chunk(peer, version, message, chunk)
        tell(connection, is_whole=num_taken == len(message["chunks"]))

    def _fold(self, connection: socket.socket, message: dict[str, Any]) -> None:
        """Take a chunk of another member's snapshot into the parity."""
        members, at, num_bytes = tuple(message["members"]), message["at"], message["parity_bytes"]
        key = (members, at, message["generation"])
        self._refuse_large(num_bytes)
        self._refuse_large(message["num_bytes"])
        with self._lock:
            if key not in self._parities or self._parities[key].num_bytes != num_bytes:
                others = [member for member in members if member != at]
                self._parities[key] = ParityBuffer(others, num_bytes)
            parity = self._parities[key]
        received_bytes = take_chunk(connection, parity, message)
        with self._lock:
            self._received_bytes += received_bytes
        tell(connection, is_whole=True)

    def _get(self, connection: socket.socket, message: dict[str, Any]) -> None:
        """Give a snapshot, or some of it or of a parity, to a worker elsewhere."""
        version = self._whole(message)
        if version is None:
            tell(connection, num_bytes=NOT_WHOLE)
            return
        memory = version.memory[message.get("begin", 0) : message.get("end")]
        connection.settimeout(PEER_TIMEOUT_S)
        tell(connection, num_bytes=len(memory))
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
    """A child's main: serve, and answer through the pipe, until the parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    server = SnapshotHost(node, rack, host, secret, network, max_snapshot_bytes)
    pipe.send(SnapshotServerReady(server.snapshot_server))
    while True:
        try:
            message = pipe.recv()
        except EOFError:
            os._exit(0)
        if message == "probe":
            pipe.send(None)
            continue
        is_question, generation = message
        if is_question:
            pipe.send(server.told(generation))
        else:
            server.forget(generation)


@contextmanager
def _well_formed(message: Mapping[str, Any]) -> Iterator[None]:
    """Raises `MalformedMessage` for one that lacks something, or has it of another type."""
    try:
        yield
    except (KeyError, TypeError, ValueError, IndexError, OverflowError) as error:
        text = f"{type(error).__name__}: {error}"
        raise MalformedMessage(f"a malformed message, {text}: {str(message)[:200]}") from error


def address_of(name: str) -> str:
    """Of a keeper's socket for the workers beside it: without a file, gone with its process."""
    return "\0" + name


def put_snapshot(peer: socket.socket, version: Version, named: Mapping[str, Any]) -> bool:
    """Send a snapshot to a keeper elsewhere; whether it is whole there. Raises OSError.

    `named` says of which worker, generation and step, and which step the keeper is to keep.
    """
    about = {key: named[key] for key in ("worker", "generation", "step", "kept_step")}
    tell(peer, do="put", **about, num_bytes=version.num_bytes)
    send_all(peer, version.memory)
    if version.step != named["step"]:
        return False
    tell(peer, step=named["step"])
    return bool((hear(peer) or {}).get("is_whole"))
