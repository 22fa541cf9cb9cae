"""A process that knows where a snapshot server or the store listens, but not the run's secret.

`python stranger.py DEED SOCKET HOST PORT`: prints what it has got, one JSON object a line. For the
store SOCKET is empty.
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
"""Between two rounds: they are to harm the store, not to take the machine's cores from the run."""


def connections(name: str, host: str, port: int) -> Iterator[socket.socket]:
    beside = socket.socket(socket.AF_UNIX)
    beside.connect("\0" + name)
    for sock in (beside, socket.create_connection((host, port))):
        sock.settimeout(PATIENCE_S)
        yield sock


def received(sock: socket.socket) -> tuple[int, int]:
    """How many bytes and descriptors come until the other side hangs up or falls silent."""
    num_bytes = num_fds = 0
    with suppress(OSError):
        while True:
            block, fds, *_ = socket.recv_fds(sock, 2**16, 8)
            num_fds += len(fds)
            num_bytes += len(block)
            if not block:
                break
    return num_bytes, num_fds


def asked(sock: socket.socket, **message: object) -> None:
    body = json.dumps(message).encode()
    with suppress(OSError):
        sock.sendall(struct.pack("!I", len(body)) + body)


def read(name: str, host: str, port: int) -> None:
    """Ask for a snapshot as the run's own processes do, but for the handshake."""
    about = {"worker": "w0", "generation": 3, "step": 1}
    for what in ("open", "get"):
        for sock in connections(name, host, port):
            asked(sock, do=what, **about)
            print(json.dumps({what: received(sock)}), flush=True)


def replay(name: str, host: str, port: int) -> None:
    """Open the handshake, then show the server's own proof back to it."""
    for sock in connections(name, host, port):
        sock.sendall(b"elastic-snapshots-1\n" + bytes(32))
        answer = sock.recv(64, socket.MSG_WAITALL)
        with suppress(OSError):
            sock.sendall(answer[32:])
        asked(sock, do="open", worker="w0", generation=3, step=1)
        print(json.dumps({"replay": received(sock)}), flush=True)


def harm(name: str, host: str, port: int) -> None:
    """Garbage, huge sizes and half messages, over and over."""
    huge = {"worker": "w9", "generation": 3, "num_bytes": 2**50}
    while True:
        for kind in range(5):
            for sock in connections(name, host, port):
                with sock, suppress(OSError):
                    if kind == 0:
                        sock.sendall(os.urandom(5000))
                    elif kind == 1:
                        sock.sendall(struct.pack("!I", 2**32 - 1) + b"{")
                    elif kind == 2:
                        asked(sock, do="room", **huge)
                    elif kind == 3:
                        asked(sock, do="put", step=9, kept_step=-2, **huge)
                    else:
                        sock.sendall(b"elastic-snapshots-1\n" + bytes(31))
        print(json.dumps({"harm": True}), flush=True)


def flood(name: str, host: str, port: int) -> None:
    """More connections than any server has descriptors for, all silent, renewed as they end."""
    held: list[socket.socket] = []
    while True:
        with suppress(OSError):
            for sock in connections(name, host, port):
                held.append(sock)
        if len(held) > NUM_FLOODING:
            print(json.dumps({"flood": len(held)}), flush=True)
            for sock in held[: NUM_FLOODING // 2]:
                sock.close()
            del held[: NUM_FLOODING // 2]
            time.sleep(0.01)


def store_garbage(name: str, host: str, port: int) -> None:
    """Bytes that are not the store's protocol, and the beginnings of such that are."""
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


def store_flood(name: str, host: str, port: int) -> None:
    """Connections that say nothing, renewed all the time."""
    held: list[socket.socket] = []
    while True:
        with suppress(OSError):
            held.append(socket.create_connection((host, port), PATIENCE_S))
        if len(held) > NUM_FLOODING:
            print(json.dumps({"flood": len(held)}), flush=True)
            for sock in held[: NUM_FLOODING // 2]:
                sock.close()
            del held[: NUM_FLOODING // 2]
            time.sleep(STORE_PAUSE_S)


def store_overwrite(name: str, host: str, port: int) -> None:
    """Every key that a generation's groups would use, if the number of the generation alone
    protected them."""
    from torch.distributed import TCPStore  # noqa: PLC0415  it takes seconds: for this deed alone

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


DEEDS = {
    "read": read,
    "replay": replay,
    "harm": harm,
    "flood": flood,
    "store garbage": store_garbage,
    "store flood": store_flood,
    "store overwrite": store_overwrite,
}

if __name__ == "__main__":
    deed, name, host, port = sys.argv[1:]
    DEEDS[deed](name, host, int(port))
