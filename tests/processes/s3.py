"""A real S3 server on loopback (moto's), behind a door that can be shut and opened again.

The server keeps what it has in memory; so that an outage loses nothing, it is the door that goes.
"""

from __future__ import annotations

import os
import random
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

SERVER = """
import sys, threading
from moto.moto_server.threaded_moto_server import ThreadedMotoServer
ThreadedMotoServer(ip_address="127.0.0.1", port=int(sys.argv[1]), verbose=False).start()
sys.stdin.read()
"""
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}
START_TIMEOUT_S = 60.0
NUM_KEPT_UPLOADS = 8
GET = re.compile(rb"GET [^ ?]*/([^ /?]+)[ ?]")


class Door:
    """Forwards connections to a port, unless it is shut."""

    def __init__(self, target: int) -> None:
        self.target = target
        self.port = port_of_nobody()
        self._listener: socket.socket | None = None
        self._open_ones: set[socket.socket] = set()
        self.fetched: Counter[str] = Counter()
        """How often a file has been asked for, by its name."""
        self.uploads: deque[str] = deque(maxlen=NUM_KEPT_UPLOADS)
        """The heads of the last uploads, for the message of an assertion."""

    @property
    def url(self) -> str:
        """Of a folder in a bucket behind it."""
        return self.url_of("runs")

    def url_of(self, folder: str) -> str:
        endpoint = f"http://127.0.0.1:{self.port}"
        return f"s3://bucket/{folder}?endpoint_override={endpoint}&region=us-east-1"

    def open(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", self.port), reuse_port=True)
        threading.Thread(target=self._serve, args=(self._listener,), daemon=True).start()

    def shut(self) -> None:
        """Nobody gets in any more, and who is in is thrown out."""
        listener, self._listener = self._listener, None
        if listener is None:
            return
        for sock in (listener, *self._open_ones.copy()):
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        listener.close()
        self._open_ones.clear()

    def _serve(self, listener: socket.socket) -> None:
        while True:
            try:
                incoming, _ = listener.accept()
            except OSError:
                if listener.fileno() < 0 or listener is not self._listener:
                    return  # it has been shut
                continue  # the client has gone already
            try:
                outgoing = socket.create_connection(("127.0.0.1", self.target), START_TIMEOUT_S)
                outgoing.settimeout(None)
            except OSError:
                incoming.close()  # else the client would wait for an answer that never comes
                continue
            self._open_ones |= {incoming, outgoing}
            threading.Thread(target=self._forward, args=(incoming, outgoing), daemon=True).start()

    def _forward(self, *pair: socket.socket) -> None:
        try:
            while True:
                for sock in select.select(pair, [], [])[0]:
                    data = sock.recv(1 << 16)
                    if not data:
                        return
                    if asked := GET.match(data):
                        self.fetched[asked[1].decode()] += 1
                    elif data.startswith(b"PUT "):
                        self.uploads.append(data.partition(b"\r\n\r\n")[0].decode(errors="replace"))
                    pair[1 - pair.index(sock)].sendall(data)
        except OSError:
            return  # one of the two has hung up, or the door has been shut
        finally:
            self._open_ones -= set(pair)
            for sock in pair:
                sock.close()


@contextmanager
def s3_with_keys() -> Iterator[Door]:
    """A server, and the keys to it in the environment."""
    with pytest.MonkeyPatch.context() as environment, s3_server() as door:
        for name, value in CREDENTIALS.items():
            environment.setenv(name, value)
        yield door


@contextmanager
def s3_server() -> Iterator[Door]:
    """Its door, open, with an empty bucket behind; ends the server at the end."""
    port = free_port()
    environment = {**os.environ, **CREDENTIALS}
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER, str(port)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=environment,
    )
    door = Door(port)
    try:
        _await(port, server)
        bucket = urllib.request.Request(f"http://127.0.0.1:{port}/bucket", method="PUT")
        urllib.request.urlopen(bucket).close()
        door.open()
        yield door
        door.shut()
    finally:
        server.send_signal(signal.SIGKILL)
        server.wait()


def port_of_nobody() -> int:
    """Below those that the system gives to connections: while the door is shut, nobody takes it."""
    while True:
        port = random.randrange(24_000, 32_000)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    return port


def _await(port: int, server: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1.0).close()
            return
        except OSError:
            assert server.poll() is None, "the server ended"
            assert time.monotonic() < deadline, "the server does not listen"
            time.sleep(0.1)
