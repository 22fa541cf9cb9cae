"""Parity between snapshot servers: sending and folding chunks, and rebuilding a lost part.

`elastic/reshard/parity.py` decides which bytes; this module moves them, in windows, so that no
process needs more memory than the parity itself.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from actors.runtime.handshake import connect_remote
from actors.snapshots.buffer import NOT_WHOLE, PEER_TIMEOUT_S, SnapshotBuffer, Version
from actors.snapshots.messages import (
    CHUNK_BYTES,
    receive_into,
    receive_message,
    send_all,
    send_message,
)
from elastic.protocol.commands import StartSnapshots
from elastic.reshard.parity import ParityRead, chunk_size, chunk_within, reads_for
from elastic.reshard.reshard_plan import ParityMembers
from elastic.reshard.snapshot_placement import SnapshotServer


class ParityBuffer:
    """Two versions of the XOR of one chunk of each worker's part.

    A version is complete once all chunks of its step are folded in, each exactly once. A chunk that
    breaks off half-way spoils the step, since its folded bytes cannot be identified.
    """

    def __init__(self, workers: Sequence[str], num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.buffer = SnapshotBuffer.new(num_bytes)
        self._workers = frozenset(workers)
        self._lock = threading.Lock()
        self._step = NOT_WHOLE
        self._version: Version
        self._begun: set[str] = set()
        self._folded: set[str] = set()

    def begin(self, worker: str, step: int, kept_step: int) -> bool:
        """Whether the worker's chunk is still needed. Raises ConnectionError if it is refused."""
        with self._lock:
            if step < self._step:
                raise ConnectionError("a newer step is under way")
            if step > self._step:
                self._version = self.buffer.version_to_overwrite(kept_step)
                self._version.step = NOT_WHOLE
                np.frombuffer(self._version.memory, np.uint8).fill(0)
                self._step, self._begun, self._folded = step, set(), set()
            if worker in self._folded:
                return False
            if worker in self._begun:
                raise ConnectionError("half of this chunk was received before")
            self._begun.add(worker)
            return True

    def fold(self, step: int, begin: int, window: memoryview) -> None:
        """XOR a window into the parity. Raises ConnectionError if a newer step has begun."""
        with self._lock:
            self._check(step)
            xor_into(self._version.memory[begin : begin + len(window)], window)

    def end(self, worker: str, step: int) -> None:
        """Note that a worker's chunk is complete."""
        with self._lock:
            self._check(step)
            self._folded.add(worker)
            if self._folded == self._workers:
                self._version.step = step

    def _check(self, step: int) -> None:
        if step != self._step:
            raise ConnectionError("a newer step has begun")


def parity_request(order: StartSnapshots, worker: str, sizes: Sequence[int]) -> dict[str, Any]:
    """The fields of a "spread" message to a worker's snapshot server: its set, and the chunks.

    `sizes` are of the parts of the set. The first chunk goes to the next member, so that not all
    servers send to the same one.
    """
    members = next(workers for workers in order.sets if worker in workers)
    me, num_members = members.index(worker), len(members)
    chunks = []
    for shift in range(1, num_members):
        target = (me + shift) % num_members
        snapshot_server = order.snapshot_servers[order.workers.index(members[target])][0]
        chunk = chunk_within(sizes, me, target)
        address = {"host": snapshot_server.host, "port": snapshot_server.port}
        chunks.append(address | {"at": members[target], "begin": chunk.start, "end": chunk.stop})
    return {"members": members, "parity_bytes": chunk_size(sizes), "chunks": chunks}


def send_chunk(
    peer: socket.socket, version: Version, request: Mapping[str, Any], chunk: Mapping[str, Any]
) -> bool:
    """Send a chunk of a snapshot to the server of another member of its set.

    Returns whether the chunk is in the parity there. Raises OSError.
    """
    keys = ("worker", "generation", "step", "kept_step", "members", "parity_bytes")
    header = {key: request[key] for key in keys}
    num_bytes = chunk["end"] - chunk["begin"]
    send_message(peer, do="fold", **header, at=chunk["at"], num_bytes=num_bytes)
    answer = receive_message(peer)
    if answer is None:
        return False
    if answer["is_wanted"]:  # false if the chunk was received before
        send_all(peer, version.memory[chunk["begin"] : chunk["end"]])
        if version.step != request["step"]:
            return False
        send_message(peer, step=request["step"])
    return bool((receive_message(peer) or {}).get("is_whole"))


def receive_chunk(
    connection: socket.socket, parity: ParityBuffer, message: Mapping[str, Any]
) -> int:
    """Fold in a chunk from another server; returns the number of bytes received.

    Raises OSError if the chunk is not complete.
    """
    worker, step, num_bytes = message["worker"], message["step"], message["num_bytes"]
    connection.settimeout(PEER_TIMEOUT_S)
    is_wanted = parity.begin(worker, step, message["kept_step"])
    send_message(connection, is_wanted=is_wanted)
    if not is_wanted:
        return 0
    scratch = memoryview(bytearray(min(CHUNK_BYTES, num_bytes)))
    for begin in range(0, num_bytes, CHUNK_BYTES):
        window = scratch[: min(CHUNK_BYTES, num_bytes - begin)]
        receive_into(connection, window)
        parity.fold(step, begin, window)
    if receive_message(connection) != {"step": step}:
        raise ConnectionError("the snapshot was overwritten while it was sent")
    parity.end(worker, step)
    return int(num_bytes)


def rebuild_part(
    member: str,
    others: ParityMembers,
    snapshot_servers: Mapping[str, SnapshotServer],
    sizes: Sequence[int],
    version: Mapping[str, Any],
    secret: bytes,
) -> memoryview:
    """Rebuild a lost member's snapshot from its set's surviving snapshots and parities.

    Reads from all servers at once. `version` has generation and step. Raises OSError.
    """
    members = [worker for worker, _ in others]
    lost = members.index(member)
    rebuilt, folding = memoryview(bytearray(sizes[lost])), threading.Lock()
    reads = tuple(reads_for(sizes, lost))

    def fetch(index: int) -> None:
        server = snapshot_servers[others[index][1]]
        with connect_remote((server.host, server.port), secret, PEER_TIMEOUT_S) as peer:
            for read in reads:
                if read.member == index:
                    for begin, window in _fetch_windows(peer, read, members, version):
                        with folding:
                            xor_into(rebuilt[begin : begin + len(window)], window)

    alive = [index for index, (_, node) in enumerate(others) if node]
    with ThreadPoolExecutor(len(alive)) as pool:
        list(pool.map(fetch, alive))
    return rebuilt


def _fetch_windows(
    peer: socket.socket, read: ParityRead, members: Sequence[str], version: Mapping[str, Any]
) -> Iterator[tuple[int, memoryview]]:
    """The bytes of a read, window by window, each with its offset in the rebuilt part."""
    member, end = members[read.member], read.begin + read.num_bytes
    source = {"members": members, "at": member} if read.is_parity else {"worker": member}
    send_message(peer, do="get", **version, **source, begin=read.begin, end=end)
    if (receive_message(peer) or {}).get("num_bytes") != read.num_bytes:
        raise ConnectionError(f"the snapshot server of {member} has no such snapshot or parity")
    scratch = memoryview(bytearray(min(CHUNK_BYTES, read.num_bytes)))
    for begin in range(0, read.num_bytes, CHUNK_BYTES):
        window = scratch[: min(CHUNK_BYTES, read.num_bytes - begin)]
        receive_into(peer, window)
        yield read.into + begin, window


def xor_into(target: memoryview, source: memoryview) -> None:
    result = np.frombuffer(target, np.uint8)
    np.bitwise_xor(result, np.frombuffer(source, np.uint8), out=result)
