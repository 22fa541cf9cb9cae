"""A process that knows where a snapshot server or the store listens, but not the run's secret.

`python stranger.py ATTACK SOCKET HOST PORT` prints what it received, one JSON object a line.
For the store, SOCKET is empty.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import sys
import time
from collections.abc import Iterator
from contextlib import suppress

NUM_FLOODING = 600
PATIENCE_S = 5.0
STORE_PAUSE_S = 0.05
"""Between two rounds: the attack must not starve the run of CPU time."""


def open_connections(name: str, host: str, port: int) -> Iterator[socket.socket]:
    local_socket = socket.socket(socket.AF_UNIX)
    local_socket.connect("\0" + name)
    for sock in (local_socket, socket.create_connection((host, port))):
        sock.settimeout(PATIENCE_S)
        yield sock


def count_received(sock: socket.socket) -> tuple[int, int]:
    """Count bytes and descriptors until the server closes the connection or sends no more."""
    num_bytes = num_fds = 0
    with suppress(OSError):
        while True:
            block, fds, *_ = socket.recv_fds(sock, 2**16, 8)
            num_fds += len(fds)
            num_bytes += len(block)
            if not block:
                break
    return num_bytes, num_fds


def send_request(sock: socket.socket, **message: object) -> None:
    body = json.dumps(message).encode()
    with suppress(OSError):
        sock.sendall(struct.pack("!I", len(body)) + body)


def read_snapshots(name: str, host: str, port: int) -> None:
    """Request a snapshot as the processes of the run do, but without the handshake."""
    snapshot = {"worker": "w0", "generation": 3, "step": 1}
    for action in ("open", "get"):
        for sock in open_connections(name, host, port):
            send_request(sock, do=action, **snapshot)
            print(json.dumps({action: count_received(sock)}), flush=True)


def replay_proof(name: str, host: str, port: int) -> None:
    """Begin the handshake, then send the proof of the server back to it."""
    for sock in open_connections(name, host, port):
        sock.sendall(b"elastic-snapshots-1\n" + bytes(32))
        answer = sock.recv(64, socket.MSG_WAITALL)
        with suppress(OSError):
            sock.sendall(answer[32:])
        send_request(sock, do="open", worker="w0", generation=3, step=1)
        print(json.dumps({"replay": count_received(sock)}), flush=True)


def send_garbage(name: str, host: str, port: int) -> None:
    """Send garbage, huge sizes and incomplete messages, repeatedly."""
    huge = {"worker": "w9", "generation": 3, "num_bytes": 2**50}
    while True:
        for kind in range(5):
            for sock in open_connections(name, host, port):
                with sock, suppress(OSError):
                    if kind == 0:
                        sock.sendall(os.urandom(5000))
                    elif kind == 1:
                        sock.sendall(struct.pack("!I", 2**32 - 1) + b"{")
                    elif kind == 2:
                        send_request(sock, do="room", **huge)
                    elif kind == 3:
                        send_request(sock, do="put", step=9, kept_step=-2, **huge)
                    else:
                        sock.sendall(b"elastic-snapshots-1\n" + bytes(31))
        print(json.dumps({"harm": True}), flush=True)


def flood_server(name: str, host: str, port: int) -> None:
    """Open more silent connections than a server has descriptors, and renew them."""
    sockets: list[socket.socket] = []
    while True:
        with suppress(OSError):
            for sock in open_connections(name, host, port):
                sockets.append(sock)
        if len(sockets) > NUM_FLOODING:
            print(json.dumps({"flood": len(sockets)}), flush=True)
            for sock in sockets[: NUM_FLOODING // 2]:
                sock.close()
            del sockets[: NUM_FLOODING // 2]
            time.sleep(0.01)


def send_garbage_to_store(name: str, host: str, port: int) -> None:
    """Send bytes that are not the protocol of the store, and incomplete messages that are."""
    while True:
        for kind in range(4):
            with suppress(OSError), socket.create_connection((host, port), PATIENCE_S) as sock:
                if kind == 0:
                    sock.sendall(os.urandom(5000))
                elif kind == 1:
                    sock.sendall(b"GET / HTTP/1.1\r\n\r\n")
                elif kind == 2:
                    sock.sendall(b"\0" * 5000)
                else:
                    sock.sendall(b"\xff")
        print(json.dumps({"garbage": True}), flush=True)
        time.sleep(STORE_PAUSE_S)


def flood_store(name: str, host: str, port: int) -> None:
    """Open silent connections, and renew them continuously."""
    sockets: list[socket.socket] = []
    while True:
        with suppress(OSError):
            sockets.append(socket.create_connection((host, port), PATIENCE_S))
        if len(sockets) > NUM_FLOODING:
            print(json.dumps({"flood": len(sockets)}), flush=True)
            for sock in sockets[: NUM_FLOODING // 2]:
                sock.close()
            del sockets[: NUM_FLOODING // 2]
            time.sleep(STORE_PAUSE_S)


def overwrite_store_keys(name: str, host: str, port: int) -> None:
    """Overwrite the keys that groups would use if only the generation number protected them."""
    from torch.distributed import TCPStore  # noqa: PLC0415  slow to import

    store = TCPStore(host, port, is_master=False, wait_for_workers=False)
    groups = ["", *(f"/{number}/" for number in range(1, 6))]
    keys = [
        f"generation-{generation}/0/{group}/cpu//0/{rank}"
        for generation in range(1, 6)
        for group in groups
        for rank in range(3)
    ]
    while True:
        for key in keys:
            store.set(key, "garbage")
        print(json.dumps({"overwritten": len(keys)}), flush=True)
        time.sleep(STORE_PAUSE_S)


ATTACKS = {
    "read": read_snapshots,
    "replay": replay_proof,
    "harm": send_garbage,
    "flood": flood_server,
    "store garbage": send_garbage_to_store,
    "store flood": flood_store,
    "store overwrite": overwrite_store_keys,
}

if __name__ == "__main__":
    attack, name, host, port = sys.argv[1:]
    ATTACKS[attack](name, host, int(port))
