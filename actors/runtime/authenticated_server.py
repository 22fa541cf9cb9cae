"""The door of a server: accepts connections, authenticates them, and gives each a thread.

Until a connection is authenticated it has no thread and few bytes: one thread reads them all, drops
those that are late or wrong, and, where there are too many, the one that has waited longest. So no
stranger holds up others, and nothing that one sends, or lacks, ends the loop.
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
"""Connections at once that have not yet been authenticated; fewer where descriptors are few."""
MAX_OPEN = 4096
"""Connections at once that have been; each has a thread."""
ACCEPTED_AT_ONCE = 64
NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS)
NO_ROOM_PAUSE_S = 0.05


@dataclass(eq=False)
class _Pending:
    """A connection in its handshake."""

    socket: socket.socket
    deadline: float
    received: bytearray = field(default_factory=bytearray)
    expected: bytes = b""
    """The proof that must come, once the opening has."""


class AuthenticatedServer:
    """Serves `listeners` from construction on, until its process ends."""

    def __init__(
        self,
        listeners: Sequence[socket.socket],
        secret: bytes,
        serve: Callable[[socket.socket], None],
    ) -> None:
        """`serve` is called with each authenticated connection, in a thread of its own."""
        self._secret = secret
        self._serve = serve
        self._pending: dict[socket.socket, _Pending] = {}
        self._open = threading.BoundedSemaphore(MAX_OPEN)
        self._spare: int | None = os.open(os.devnull, os.O_RDONLY)
        """A descriptor to give up, so that a connection can be accepted and closed without one."""
        self._said: set[type[Exception]] = set()
        self._selector = selectors.DefaultSelector()
        for listener in listeners:
            listener.setblocking(False)
            self._selector.register(listener, selectors.EVENT_READ)
        threading.Thread(target=self._run, name="door", daemon=True).start()

    def _run(self) -> None:
        """Whatever the code of one round raises, as `MemoryError` anywhere: connections that are
        open, and those to come, are not to be lost by it."""
        while True:
            try:
                self._serve_round()
            except Exception as error:
                self._say_once(error)
                time.sleep(NO_ROOM_PAUSE_S)

    def _say_once(self, error: Exception) -> None:
        with suppress(Exception):  # there may be no memory for a message, or nobody to read it
            if type(error) not in self._said:
                self._said.add(type(error))
                text = "".join(traceback.format_exception(error))
                print(f"the door of a server goes on after\n{text}", file=sys.stderr, flush=True)

    def _serve_round(self) -> None:
        for key, _ in self._selector.select(self._until_next_deadline()):
            sock = key.fileobj
            assert isinstance(sock, socket.socket)
            pending = self._pending.get(sock)
            if pending is not None:
                self._advance(pending)
            elif sock.fileno() >= 0:  # one that was dropped meanwhile is closed
                for _ in range(ACCEPTED_AT_ONCE):
                    if not self._accept(sock):
                        break
        now = time.monotonic()
        for pending in [p for p in self._pending.values() if p.deadline <= now]:
            self._drop(pending)

    def _until_next_deadline(self) -> float | None:
        first = next(iter(self._pending.values()), None)  # the first to come is the first due
        return None if first is None else max(0.0, first.deadline - time.monotonic())

    def _accept(self, listener: socket.socket) -> bool:
        """One connection; whether there may be more."""
        try:
            connection, _ = listener.accept()
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno in NO_ROOM:
                self._make_room(listener)
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
        self._advance(pending)  # of the run's own processes the opening is there already
        return True

    def _least_promising(self) -> _Pending:
        """The oldest of those that have not sent their opening, or else the oldest."""
        oldest = next(iter(self._pending.values()))
        return next((p for p in self._pending.values() if not p.expected), oldest)

    def _make_room(self, listener: socket.socket) -> None:
        """There is no descriptor for another connection: end the oldest that is pending, or else
        the new one, which would otherwise wait, and wake this loop, for ever."""
        if self._pending:
            self._drop(self._least_promising())
            return
        if self._spare is not None:
            os.close(self._spare)
            self._spare = None
            with suppress(OSError):
                listener.accept()[0].close()
        with suppress(OSError):
            self._spare = os.open(os.devnull, os.O_RDONLY)
        time.sleep(NO_ROOM_PAUSE_S)

    def _advance(self, pending: _Pending) -> None:
        """Read what has come of a handshake."""
        try:
            self._read(pending)
        except BlockingIOError:
            return
        except Exception:  # mostly OSError; or no thread can be started, or there is no memory
            self._drop(pending)

    def _read(self, pending: _Pending) -> None:
        """Raises OSError for what is no handshake."""
        wanted = PROOF_BYTES if pending.expected else OPENING_BYTES
        more = pending.socket.recv(wanted - len(pending.received))
        pending.received += more
        received = bytes(pending.received)
        if not more or not (pending.expected or GREETING.startswith(received[: len(GREETING)])):
            raise ConnectionError("it is no handshake")
        if len(received) < wanted:
            return
        if not pending.expected:
            theirs, mine = received[len(GREETING) :], secrets.token_bytes(NONCE_BYTES)
            pending.expected = proof(self._secret, b"connecting", theirs, mine)
            pending.received.clear()
            shown = mine + proof(self._secret, b"listening", theirs, mine)
            if pending.socket.send(shown) != len(shown):
                raise ConnectionError("it takes nothing")
        elif hmac.compare_digest(received, pending.expected):
            self._admit(pending)
        else:
            raise ConnectionError("it does not know the secret")

    def _admit(self, pending: _Pending) -> None:
        if not self._open.acquire(blocking=False):
            raise ConnectionError("there are too many")
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
    """How many this process may have: most of them are not for strangers."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
