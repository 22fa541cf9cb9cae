"""Authenticated server: accepts connections, runs the handshake, and gives each its own thread.

Until a connection is authenticated it has no thread and few bytes. One thread reads all pending
connections. It drops late and wrong ones and, if there are too many, the one that has waited
longest. So no stranger delays the run's own processes, and no input ends the loop.
"""

from __future__ import annotations

import errno
import hmac
import os
import resource
import secrets
import selectors
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from actors.runtime.handshake import (
    GREETING,
    HANDSHAKE_TIMEOUT_S,
    NONCE_BYTES,
    OPENING_BYTES,
    PROOF_BYTES,
    proof,
    refuse_other_users,
)

MAX_PENDING = 128
"""Simultaneous connections that are not yet authenticated; fewer if descriptors are few."""
MAX_OPEN = 4096
"""Simultaneous authenticated connections; each has a thread."""
ACCEPT_BATCH = 64
EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS)
EXHAUSTED_PAUSE_S = 0.05


@dataclass(eq=False)
class _Pending:
    """A connection in its handshake."""

    socket: socket.socket
    deadline: float
    received: bytearray = field(default_factory=bytearray)
    expected: bytes = b""
    """The proof that the peer must send, set once its opening has arrived."""


class AuthenticatedServer:
    """Serves `listeners` from construction until its process ends."""

    def __init__(
        self,
        listeners: Sequence[socket.socket],
        secret: bytes,
        serve: Callable[[socket.socket], None],
    ) -> None:
        """`serve` is called with each authenticated connection, in its own thread."""
        self._secret = secret
        self._serve = serve
        self._pending: dict[socket.socket, _Pending] = {}
        self._open = threading.BoundedSemaphore(MAX_OPEN)
        self._reserve_fd: int | None = os.open(os.devnull, os.O_RDONLY)
        """Closed when descriptors run out, so that a connection can be accepted and closed."""
        self._logged: set[type[Exception]] = set()
        self._selector = selectors.DefaultSelector()
        for listener in listeners:
            listener.setblocking(False)
            self._selector.register(listener, selectors.EVENT_READ)
        threading.Thread(target=self._run, name="accept", daemon=True).start()

    def _run(self) -> None:
        """No exception of one round, such as a `MemoryError`, may end the accept loop."""
        while True:
            try:
                self._serve_round()
            except Exception as error:
                self._log_once(error)
                time.sleep(EXHAUSTED_PAUSE_S)

    def _log_once(self, error: Exception) -> None:
        with suppress(Exception):  # there may be no memory for a message, or stderr is closed
            if type(error) not in self._logged:
                self._logged.add(type(error))
                text = "".join(traceback.format_exception(error))
                print(f"the server keeps accepting after\n{text}", file=sys.stderr, flush=True)

    def _serve_round(self) -> None:
        for key, _ in self._selector.select(self._until_next_deadline()):
            sock = key.fileobj
            assert isinstance(sock, socket.socket)
            pending = self._pending.get(sock)
            if pending is not None:
                self._advance(pending)
            elif sock.fileno() >= 0:  # a connection dropped in this round is closed
                for _ in range(ACCEPT_BATCH):
                    if not self._accept(sock):
                        break
        now = time.monotonic()
        for pending in [p for p in self._pending.values() if p.deadline <= now]:
            self._drop(pending)

    def _until_next_deadline(self) -> float | None:
        first = next(iter(self._pending.values()), None)  # the oldest is due first
        return None if first is None else max(0.0, first.deadline - time.monotonic())

    def _accept(self, listener: socket.socket) -> bool:
        """Accept one connection; returns whether there may be more."""
        try:
            connection, _ = listener.accept()
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno in EXHAUSTED:
                self._free_descriptor(listener)
            return False
        try:
            if listener.family == socket.AF_UNIX:
                refuse_other_users(connection)
            connection.setblocking(False)
            if len(self._pending) >= min(MAX_PENDING, _num_descriptors() // 4):
                self._drop(self._least_promising())
            self._selector.register(connection, selectors.EVENT_READ)
        except OSError:
            connection.close()
            return True
        except BaseException:
            connection.close()
            raise
        deadline = time.monotonic() + HANDSHAKE_TIMEOUT_S
        pending = self._pending[connection] = _Pending(connection, deadline)
        self._advance(pending)  # the run's own processes have sent their opening already
        return True

    def _least_promising(self) -> _Pending:
        """The oldest connection that has not sent its opening, or else the oldest of all."""
        oldest = next(iter(self._pending.values()))
        return next((p for p in self._pending.values() if not p.expected), oldest)

    def _free_descriptor(self, listener: socket.socket) -> None:
        """Close a connection because descriptors have run out: the oldest pending one, or else the
        new one, which would otherwise wait, and wake this loop, for ever."""
        if self._pending:
            self._drop(self._least_promising())
            return
        if self._reserve_fd is not None:
            os.close(self._reserve_fd)
            self._reserve_fd = None
            with suppress(OSError):
                listener.accept()[0].close()
        with suppress(OSError):
            self._reserve_fd = os.open(os.devnull, os.O_RDONLY)
        time.sleep(EXHAUSTED_PAUSE_S)

    def _advance(self, pending: _Pending) -> None:
        """Read the available bytes of a handshake."""
        try:
            self._read(pending)
        except BlockingIOError:
            return
        except Exception:  # mostly OSError; or no thread can be started, or there is no memory
            self._drop(pending)

    def _read(self, pending: _Pending) -> None:
        """Raises OSError if the bytes are not a handshake with the run's secret."""
        wanted = PROOF_BYTES if pending.expected else OPENING_BYTES
        more = pending.socket.recv(wanted - len(pending.received))
        pending.received += more
        received = bytes(pending.received)
        if not more or not (pending.expected or GREETING.startswith(received[: len(GREETING)])):
            raise ConnectionError("not a handshake")
        if len(received) < wanted:
            return
        if not pending.expected:
            client_nonce, server_nonce = received[len(GREETING) :], secrets.token_bytes(NONCE_BYTES)
            pending.expected = proof(self._secret, b"connecting", client_nonce, server_nonce)
            pending.received.clear()
            answer = server_nonce + proof(self._secret, b"listening", client_nonce, server_nonce)
            if pending.socket.send(answer) != len(answer):
                raise ConnectionError("the peer does not read")
        elif hmac.compare_digest(received, pending.expected):
            self._admit(pending)
        else:
            raise ConnectionError("the peer does not know the secret")

    def _admit(self, pending: _Pending) -> None:
        if not self._open.acquire(blocking=False):
            raise ConnectionError(f"more than {MAX_OPEN} connections")
        try:
            self._forget(pending)
            pending.socket.setblocking(True)
            threading.Thread(target=self._serve_one, args=(pending.socket,), daemon=True).start()
        except BaseException:
            self._open.release()
            pending.socket.close()
            raise

    def _serve_one(self, connection: socket.socket) -> None:
        try:
            with connection:
                self._serve(connection)
        finally:
            self._open.release()

    def _forget(self, pending: _Pending) -> None:
        if self._pending.pop(pending.socket, None) is not None:
            self._selector.unregister(pending.socket)

    def _drop(self, pending: _Pending) -> None:
        self._forget(pending)
        pending.socket.close()


def _num_descriptors() -> int:
    """The descriptor limit of this process; only a part of it is for pending connections."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
