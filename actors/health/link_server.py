"""The link server of a worker: it answers the probes with which new workers measure their links."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from actors.runtime.authenticated_server import AuthenticatedServer
from actors.runtime.handshake import connect_remote
from actors.runtime.network import Network, listen
from actors.snapshots.messages import receive_into, receive_message, send_message
from actors.storage.errors import UnsuitableMachine

PROBE_BYTES = 2**22
TIMEOUT_S = 3.0
"""A link that takes longer for a part of a probe counts as not reached."""
MAX_PROBES = 4
"""At once: this process trains. A worker whose connection is closed probes again, or others."""
NUM_LEFT_PORTS = 16


class LinkServer:
    """Sends back what it receives, and measures links to other link servers on request."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._free = threading.BoundedSemaphore(MAX_PROBES)

    @classmethod
    def open(cls, host: str, network: Network, secret: bytes) -> int:
        """Serve until this process ends; returns the port, 0 if none is free.

        In a range the first ports are left to the store and the snapshot servers, which the run
        needs more.
        """
        if network.ports is not None:
            first, last = network.ports
            if first + NUM_LEFT_PORTS > last:
                return 0
            network = Network(network.interface, (first + NUM_LEFT_PORTS, last))
        try:
            listener = listen(host, network)
        except UnsuitableMachine:
            return 0  # new workers measure their links with other members
        AuthenticatedServer((listener,), secret, cls(secret)._serve)
        return int(listener.getsockname()[1])

    def _serve(self, connection: socket.socket) -> None:
        if not self._free.acquire(blocking=False):
            return
        connection.settimeout(TIMEOUT_S)
        try:
            self._answer(connection, receive_message(connection) or {})
        except OSError:
            return  # the other side sees the closed connection
        finally:
            self._free.release()

    def _answer(self, connection: socket.socket, message: dict[str, Any]) -> None:
        match message:
            case {"do": "echo"}:
                memory = memoryview(bytearray(PROBE_BYTES))
                receive_into(connection, memory)
                connection.sendall(memory)
            case {"do": "measure", "host": str(host), "port": int(port)}:
                send_message(connection, speed=measure_link((host, port), self._secret))


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
        with connect_remote(address, secret, TIMEOUT_S) as peer:
            host, port = other
            peer.settimeout(2 * TIMEOUT_S)
            send_message(peer, do="measure", host=host, port=port)
            return float((receive_message(peer) or {}).get("speed", 0.0))
    except OSError:
        return 0.0
