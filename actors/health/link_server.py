"""The link server of a worker: it answers the probes with which new workers measure their links."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from contextlib import suppress

from actors.runtime.authenticated_server import AuthenticatedServer
from actors.runtime.handshake import connect_remote
from actors.runtime.network import Network, listen
from actors.snapshots.messages import receive_into, receive_message, send_message
from actors.storage.errors import UnsuitableMachine

PROBE_BYTES = 2**22
TIMEOUT_S = 10.0


class LinkServer:
    """Sends back what it receives, and measures links to other link servers on request."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    @classmethod
    def open(cls, host: str, network: Network, secret: bytes) -> int:
        """Serve until this process ends; returns the port, 0 if none is free."""
        try:
            listener = listen(host, network)
        except UnsuitableMachine:
            return 0  # the range of ports is small: new workers use other members
        AuthenticatedServer((listener,), secret, cls(secret)._serve)
        return int(listener.getsockname()[1])

    def _serve(self, connection: socket.socket) -> None:
        connection.settimeout(TIMEOUT_S)
        with suppress(OSError):  # the other side sees the closed connection
            while (message := receive_message(connection)) is not None:
                if message["do"] == "echo":
                    memory = memoryview(bytearray(PROBE_BYTES))
                    receive_into(connection, memory)
                    connection.sendall(memory)
                else:
                    address = str(message["host"]), int(message["port"])
                    speed = measure_link(address, self._secret)
                    send_message(connection, speed=speed)


def measure_link(
    address: tuple[str, int], secret: bytes, delay: Callable[[float], None] = lambda elapsed_s: None
) -> float:
    """Bytes a second to a link server and back; 0 if it does not answer.

    `delay` is called within the measured time, with the time that the transfer took.
    """
    memory = memoryview(bytearray(PROBE_BYTES))
    try:
        with connect_remote(address, secret, TIMEOUT_S) as peer:
            began = time.perf_counter()
            send_message(peer, do="echo")
            peer.sendall(memory)
            receive_into(peer, memory)
            delay(time.perf_counter() - began)
            return 2 * PROBE_BYTES / (time.perf_counter() - began)
    except OSError:
        return 0.0


def ask_for_link(address: tuple[str, int], other: tuple[str, int], secret: bytes) -> float:
    """Bytes a second between two link servers, measured by the first; 0 if either does not
    answer."""
    try:
        with connect_remote(address, secret, 2 * TIMEOUT_S) as peer:
            host, port = other
            send_message(peer, do="measure", host=host, port=port)
            return float((receive_message(peer) or {}).get("speed", 0.0))
    except OSError:
        return 0.0
