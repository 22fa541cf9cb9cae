"""Mutual authentication of our connections: both sides prove that they know the run's secret.

The side that connects sends a fresh nonce. The other answers with a nonce of its own and an HMAC of
both, and gets another HMAC back. The secret itself is never sent, and what is recorded on the wire
proves nothing later. The bytes after the handshake are neither encrypted nor authenticated.
"""

from __future__ import annotations

import hmac
import os
import random
import secrets
import socket
import struct
import time
from collections.abc import Callable

SECRET_BYTES = 32
GREETING = b"elastic-snapshots-1\n"
NONCE_BYTES = PROOF_BYTES = 32
OPENING_BYTES = len(GREETING) + NONCE_BYTES
HANDSHAKE_TIMEOUT_S = 10.0
"""For all of it: a machine with far more processes than cores takes its time."""
NUM_TRIES, RETRY_PAUSE_S = 20, 0.1
_CREDENTIALS = struct.Struct("3i")


class Unauthenticated(ConnectionError):
    """The other side does not know the secret of this run, or is another user's process."""


class HungUp(Unauthenticated):
    """The other side ended the connection during the handshake."""


def new_secret() -> bytes:
    """For one run: handed to its own processes by Ray or through pipes, and written nowhere."""
    return secrets.token_bytes(SECRET_BYTES)


def proof(secret: bytes, role: bytes, connecting: bytes, listening: bytes) -> bytes:
    """What one side shows: `role` keeps one's proof from being shown back as the other's."""
    return hmac.digest(secret, role + b":" + connecting + listening, "sha256")


def store_prefix(secret: bytes, generation: int) -> str:
    """What the names of a generation's keys in the store begin with: nobody without the secret can
    guess it."""
    return hmac.digest(secret, b"store:%d" % generation, "sha256").hex()


def connect_beside(name: str, secret: bytes, timeout_s: float) -> socket.socket:
    """An authenticated connection to an abstract socket of this machine. Raises OSError."""

    def connect() -> socket.socket:
        sock = socket.socket(socket.AF_UNIX)
        try:
            sock.settimeout(timeout_s)
            sock.connect("\0" + name)
            refuse_other_users(sock)
        except BaseException:
            sock.close()
            raise
        return sock

    return _introduced(connect, secret, timeout_s)


def connect_afar(address: tuple[str, int], secret: bytes, timeout_s: float) -> socket.socket:
    """An authenticated connection over the network. Raises OSError."""
    return _introduced(lambda: socket.create_connection(address, timeout_s), secret, timeout_s)


def refuse_other_users(sock: socket.socket) -> None:
    """Raises `Unauthenticated` if another user's process is at the other end of a Unix socket."""
    told = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, uid, _ = _CREDENTIALS.unpack(told)
    if uid != os.geteuid():
        raise Unauthenticated(f"the process at the other end is user {uid}'s")


def _introduced(
    connect: Callable[[], socket.socket], secret: bytes, timeout_s: float
) -> socket.socket:
    """A server that strangers crowd may drop a connection in its handshake, or have no place for it
    yet: it is made again."""
    deadline = time.monotonic() + HANDSHAKE_TIMEOUT_S
    for tries_left in reversed(range(NUM_TRIES)):
        sock = _connected(connect, deadline)
        try:
            _introduce(sock, secret)
            sock.settimeout(timeout_s)
            return sock
        except (ConnectionResetError, BrokenPipeError, HungUp):
            sock.close()
            if not tries_left:
                raise
            time.sleep(random.uniform(0.0, RETRY_PAUSE_S))
        except BaseException:
            sock.close()
            raise
    raise AssertionError("the last try returns or raises")


def _connected(connect: Callable[[], socket.socket], deadline: float) -> socket.socket:
    """The kernel refuses a connection to a Unix socket at once while the listener's queue is full,
    if the socket has a timeout."""
    while True:
        try:
            return connect()
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise
            time.sleep(random.uniform(0.0, RETRY_PAUSE_S))


def _introduce(sock: socket.socket, secret: bytes) -> None:
    """The connecting side of the handshake."""
    deadline = time.monotonic() + HANDSHAKE_TIMEOUT_S
    mine = secrets.token_bytes(NONCE_BYTES)
    sock.sendall(GREETING + mine)
    answer = _exactly(sock, NONCE_BYTES + PROOF_BYTES, deadline)
    theirs, shown = answer[:NONCE_BYTES], answer[NONCE_BYTES:]
    if not hmac.compare_digest(shown, proof(secret, b"listening", mine, theirs)):
        raise Unauthenticated("who listens there does not know this run's secret")
    sock.sendall(proof(secret, b"connecting", mine, theirs))


def _exactly(sock: socket.socket, num_bytes: int, deadline: float) -> bytes:
    found = b""
    while len(found) < num_bytes:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("the handshake took too long")
        sock.settimeout(left_s)
        more = sock.recv(num_bytes - len(found))
        if not more:
            raise HungUp("it hung up during the handshake")
        found += more
    return found
