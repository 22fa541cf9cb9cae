"""Parity between keepers: chunks sent and folded together, and a lost part made again of them.

`elastic/reshard/parity.py` says which bytes; here they move, in windows, so that nobody needs more
memory
than the parity itself. Runs without Ray.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from actors.runtime.handshake import connect_afar
from actors.snapshots.buffer import NOT_WHOLE, PEER_TIMEOUT_S, SnapshotBuffer, Version
from actors.snapshots.messages import CHUNK_BYTES, hear, receive_into, send_all, tell
from elastic.protocol.commands import StartSnapshots
from elastic.reshard.parity import ParityRead, chunk_size, chunk_within, reads_for
from elastic.reshard.reshard_plan import Keepings
from elastic.reshard.snapshot_placement import SnapshotServer


class ParityBuffer:
    """Two versions of the XOR of a chunk of each of these workers' parts.

    A version is whole once all chunks of its step are in. Each comes once: after half of one the
    step is spoiled, since what has been folded in cannot be told from what has not.
    """

    def __init__(self, workers: Sequence[str], num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.room = SnapshotBuffer.new(num_bytes)
        self._workers = frozenset(workers)
        self._lock = threading.Lock()
        self._step = NOT_WHOLE
        self._version: Version
        self._begun: set[str] = set()
        self._folded: set[str] = set()

    def begin(self, worker: str, step: int, kept_step: int) -> bool:
        """Whether its chunk is still to come. Raises ConnectionError if it cannot be taken."""
        with self._lock:
            if step < self._step:
                raise ConnectionError("a newer one is under way")
            if step > self._step:
                self._version = self.room.spare(kept_step)
                self._version.step = NOT_WHOLE
                np.frombuffer(self._version.memory, np.uint8).fill(0)
                self._step, self._begun, self._folded = step, set(), set()
            if worker in self._folded:
                return False
            if worker in self._begun:
                raise ConnectionError("half of it has come before")
            self._begun.add(worker)
            return True

    def fold(self, step: int, begin: int, window: memoryview) -> None:
        """Raises ConnectionError if a newer step has begun meanwhile."""
        with self._lock:
            self._check(step)
            xor_into(self._version.memory[begin : begin + len(window)], window)

    def end(self, worker: str, step: int) -> None:
        """All of a worker's chunk is in."""
        with self._lock:
            self._check(step)
            self._folded.add(worker)
            if self._folded == self._workers:
                self._version.step = step

    def _check(self, step: int) -> None:
        if step != self._step:
            raise ConnectionError("a newer one has come")


def spreading(order: StartSnapshots, worker: str, sizes: Sequence[int]) -> dict[str, Any]:
    """What a worker's keeper is told of its set, whose parts have these sizes, and of which chunk
    goes to whom: first to the next member, so that all do not send to the same."""
    members = next(workers for workers in order.sets if worker in workers)
    me, num_members = members.index(worker), len(members)
    chunks = []
    for shift in range(1, num_members):
        to = (me + shift) % num_members
        snapshot_server = order.snapshot_servers[order.workers.index(members[to])][0]
        chunk = chunk_within(sizes, me, to)
        address = {"host": snapshot_server.host, "port": snapshot_server.port}
        chunks.append(address | {"at": members[to], "begin": chunk.start, "end": chunk.stop})
    return {"members": members, "parity_bytes": chunk_size(sizes), "chunks": chunks}


def send_chunk(
    peer: socket.socket, version: Version, named: Mapping[str, Any], chunk: Mapping[str, Any]
) -> bool:
    """Send a chunk of a snapshot to the keeper of another member of its set; whether it is in the
    parity there. Raises OSError."""
    keys = ("worker", "generation", "step", "kept_step", "members", "parity_bytes")
    about = {key: named[key] for key in keys}
    num_bytes = chunk["end"] - chunk["begin"]
    tell(peer, do="fold", **about, at=chunk["at"], num_bytes=num_bytes)
    answer = hear(peer)
    if answer is None:
        return False
    if answer["is_wanted"]:  # it has not come before
        send_all(peer, version.memory[chunk["begin"] : chunk["end"]])
        if version.step != named["step"]:
            return False
        tell(peer, step=named["step"])
    return bool((hear(peer) or {}).get("is_whole"))


def take_chunk(connection: socket.socket, parity: ParityBuffer, message: Mapping[str, Any]) -> int:
    """Fold in a chunk that another keeper sends; how many bytes came. Raises OSError if it does
    not come whole."""
    worker, step, num_bytes = message["worker"], message["step"], message["num_bytes"]
    connection.settimeout(PEER_TIMEOUT_S)
    is_wanted = parity.begin(worker, step, message["kept_step"])
    tell(connection, is_wanted=is_wanted)
    if not is_wanted:
        return 0
    scratch = memoryview(bytearray(min(CHUNK_BYTES, num_bytes)))
    for begin in range(0, num_bytes, CHUNK_BYTES):
        window = scratch[: min(CHUNK_BYTES, num_bytes - begin)]
        receive_into(connection, window)
        parity.fold(step, begin, window)
    if hear(connection) != {"step": step}:
        raise ConnectionError("it was written over while it was sent")
    parity.end(worker, step)
    return int(num_bytes)


def make_again(
    member: str,
    others: Keepings,
    snapshot_servers: Mapping[str, SnapshotServer],
    sizes: Sequence[int],
    named: Mapping[str, Any],
    secret: bytes,
) -> memoryview:
    """A lost member's snapshot, out of those of the others of its set and their parities, from all
    keepers at once; `named` is of which generation and step. Raises OSError."""
    members = [worker for worker, _ in others]
    lost = members.index(member)
    made, folding = memoryview(bytearray(sizes[lost])), threading.Lock()
    reads = tuple(reads_for(sizes, lost))

    def fetch(of: int) -> None:
        snapshot_server = snapshot_servers[others[of][1]]
        with connect_afar(
            (snapshot_server.host, snapshot_server.port), secret, PEER_TIMEOUT_S
        ) as peer:
            for read in reads:
                if read.member == of:
                    for into, window in _fetched(peer, read, members, named):
                        with folding:
                            xor_into(made[into : into + len(window)], window)

    alive = [index for index, (_, node) in enumerate(others) if node]
    with ThreadPoolExecutor(len(alive)) as pool:
        list(pool.map(fetch, alive))
    return made


def _fetched(
    peer: socket.socket, read: ParityRead, members: Sequence[str], named: Mapping[str, Any]
) -> Iterator[tuple[int, memoryview]]:
    """What is read, window by window, each with where it is to go."""
    of, end = members[read.member], read.begin + read.num_bytes
    which = {"members": members, "at": of} if read.is_parity else {"worker": of}
    tell(peer, do="get", **named, **which, begin=read.begin, end=end)
    if (hear(peer) or {}).get("num_bytes") != read.num_bytes:
        raise ConnectionError(f"the keeper of {of} has no such snapshot or parity")
    scratch = memoryview(bytearray(min(CHUNK_BYTES, read.num_bytes)))
    for begin in range(0, read.num_bytes, CHUNK_BYTES):
        window = scratch[: min(CHUNK_BYTES, read.num_bytes - begin)]
        receive_into(peer, window)
        yield read.into + begin, window


def xor_into(target: memoryview, source: memoryview) -> None:
    place = np.frombuffer(target, np.uint8)
    np.bitwise_xor(place, np.frombuffer(source, np.uint8), out=place)
