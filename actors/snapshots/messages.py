"""Messages between snapshot servers and workers: length-prefixed JSON over sockets."""

from __future__ import annotations

import json
import socket
import struct
from typing import Any

CHUNK_BYTES = 2**22
MAX_MESSAGE_BYTES = 2**22
"""The longest message names every member of the largest parity set."""
_LENGTH = struct.Struct("!I")


class MalformedMessage(ConnectionError):
    """The received bytes are not a valid message."""


def send_message(sock: socket.socket, **message: Any) -> None:
    """Send one message. Raises OSError if the other side is gone."""
    body = json.dumps(message).encode()
    sock.sendall(_LENGTH.pack(len(body)) + body)


def receive_message(sock: socket.socket) -> dict[str, Any] | None:
    """The next message, or None if the other side has closed the connection.

    Raises OSError; `MalformedMessage` if the message is too long or invalid.
    """
    head = _exactly(sock, _LENGTH.size)
    if head is None:
        return None
    [num_bytes] = _LENGTH.unpack(head)
    if num_bytes > MAX_MESSAGE_BYTES:
        raise MalformedMessage(f"a message of {num_bytes} bytes (maximum: {MAX_MESSAGE_BYTES})")
    body = _exactly(sock, num_bytes)
    if body is None:
        return None
    try:
        message = json.loads(body)
    except ValueError:
        raise MalformedMessage("a message that is not JSON") from None
    if not isinstance(message, dict):
        raise MalformedMessage("a message that is not a JSON object")
    return message


def receive_into(sock: socket.socket, memory: memoryview) -> None:
    """Fill `memory`. Raises ConnectionError if the other side closes the connection before."""
    while memory:
        num_bytes = sock.recv_into(memory)
        if not num_bytes:
            raise ConnectionError("the other side closed the connection during a snapshot")
        memory = memory[num_bytes:]


def send_all(sock: socket.socket, memory: memoryview) -> None:
    """Send `memory`, each chunk within the socket's timeout. Raises OSError."""
    for begin in range(0, len(memory), CHUNK_BYTES):
        sock.sendall(memory[begin : begin + CHUNK_BYTES])


def _exactly(sock: socket.socket, num_bytes: int) -> bytes | None:
    received = bytearray()
    while len(received) < num_bytes:
        more = sock.recv(num_bytes - len(received))
        if not more:
            return None
        received += more
    return bytes(received)
