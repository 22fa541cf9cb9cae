"""Mutual authentication of connections: both sides prove that they know the run's secret.

The connecting side sends a fresh nonce. The listening side answers with its own nonce and an HMAC
of both, and receives another HMAC. The secret is never sent, and a recorded handshake cannot be
replayed. The bytes after the handshake are neither encrypted nor authenticated.
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
"""For the whole handshake: a machine with far more processes than cores is slow."""
NUM_TRIES, RETRY_PAUSE_S = 20, 0.1
_CREDENTIALS = struct.Struct("3i")


class Unauthenticated(ConnectionError):
    """The other side does not know the secret of this run, or is another user's process."""


class ConnectionEnded(Unauthenticated):
    """The other side ended the connection during the handshake."""


def new_secret() -> bytes:
    """A secret for one run: its processes get it through Ray or pipes; it is written nowhere."""
    return secrets.token_bytes(SECRET_BYTES)


def proof(secret: bytes, role: bytes, connecting: bytes, listening: bytes) -> bytes:
    """The HMAC that one side sends; `role` keeps a proof from being reflected to its sender."""
    return hmac.digest(secret, role + b":" + connecting + listening, "sha256")


def store_prefix(secret: bytes, generation: int) -> str:
    """The prefix of a generation's store keys, which cannot be guessed without the secret."""
    return hmac.digest(secret, b"store:%d" % generation, "sha256").hex()


def connect_local(name: str, secret: bytes, timeout_s: float) -> socket.socket:
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

    return _authenticated(connect, secret, timeout_s)


def connect_remote(address: tuple[str, int], secret: bytes, timeout_s: float) -> socket.socket:
    """An authenticated connection over the network. Raises OSError."""
    return _authenticated(lambda: socket.create_connection(address, timeout_s), secret, timeout_s)


def refuse_other_users(sock: socket.socket) -> None:
    """Raises `Unauthenticated` if another user's process is at the other end of a Unix socket."""
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, uid, _ = _CREDENTIALS.unpack(credentials)
    if uid != os.geteuid():
        raise Unauthenticated(f"the process at the other end belongs to user {uid}")


def _authenticated(
    connect: Callable[[], socket.socket], secret: bytes, timeout_s: float
) -> socket.socket:
    """Connect and run the handshake, with retries: a server flooded by strangers may drop a
    connection during its handshake, or have no place for it yet."""
    deadline = time.monotonic() + HANDSHAKE_TIMEOUT_S
    for tries_left in reversed(range(NUM_TRIES)):
        sock = _connect_retrying(connect, deadline)
        try:
            _authenticate(sock, secret)
            sock.settimeout(timeout_s)
            return sock
        except (ConnectionResetError, BrokenPipeError, ConnectionEnded):
            sock.close()
            if not tries_left:
                raise
            time.sleep(random.uniform(0.0, RETRY_PAUSE_S))
        except BaseException:
            sock.close()
            raise
    raise AssertionError("the last try returns or raises")


def _connect_retrying(connect: Callable[[], socket.socket], deadline: float) -> socket.socket:
    """Retry while the listener's queue is full: then, if a Unix socket has a timeout, the kernel
    refuses the connection at once."""
    while True:
        try:
            return connect()
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise
            time.sleep(random.uniform(0.0, RETRY_PAUSE_S))


def _authenticate(sock: socket.socket, secret: bytes) -> None:
    """The connecting side of the handshake."""
    deadline = time.monotonic() + HANDSHAKE_TIMEOUT_S
    client_nonce = secrets.token_bytes(NONCE_BYTES)
    sock.sendall(GREETING + client_nonce)
    answer = _exactly(sock, NONCE_BYTES + PROOF_BYTES, deadline)
    server_nonce, server_proof = answer[:NONCE_BYTES], answer[NONCE_BYTES:]
    if not hmac.compare_digest(
        server_proof, proof(secret, b"listening", client_nonce, server_nonce)
    ):
        raise Unauthenticated("the listening process does not know this run's secret")
    sock.sendall(proof(secret, b"connecting", client_nonce, server_nonce))


def _exactly(sock: socket.socket, num_bytes: int, deadline: float) -> bytes:
    received = b""
    while len(received) < num_bytes:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("the handshake took too long")
        sock.settimeout(left_s)
        more = sock.recv(num_bytes - len(received))
        if not more:
            raise ConnectionEnded("the other side closed the connection during the handshake")
        received += more
    return received
