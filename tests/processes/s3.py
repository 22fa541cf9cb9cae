"""A real S3 server on loopback (moto's), behind a proxy that can be closed and opened again.

The server holds its objects in memory. An outage closes the proxy, so that no object is lost.
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
NUM_KEPT_HEADERS = 8
REQUEST = re.compile(rb"(GET|HEAD|PUT|POST|DELETE) /")
GET = re.compile(rb"GET [^ ?]*/([^ /?]+)[ ?]")


class S3Proxy:
    """Forwards connections to the port of an S3 server, unless it is closed."""

    def __init__(self, target_port: int) -> None:
        self.target_port = target_port
        self.port = find_unused_port()
        self._listener: socket.socket | None = None
        self._sockets: set[socket.socket] = set()
        self.num_fetches: Counter[str] = Counter()
        """How often clients have requested a file, by its name."""
        self.num_requests: Counter[str] = Counter()
        """How often clients have sent a request, by its method."""
        self.upload_headers: deque[str] = deque(maxlen=NUM_KEPT_HEADERS)
        """The headers of the last uploads, for the message of an assertion."""

    @property
    def url(self) -> str:
        """URL of a folder in the bucket."""
        return self.url_of("runs")

    def url_of(self, folder: str) -> str:
        endpoint = f"http://127.0.0.1:{self.port}"
        return f"s3://bucket/{folder}?endpoint_override={endpoint}&region=us-east-1"

    def open(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", self.port), reuse_port=True)
        threading.Thread(target=self._serve, args=(self._listener,), daemon=True).start()

    def close(self) -> None:
        """Refuse new connections, and break the open ones."""
        listener, self._listener = self._listener, None
        if listener is None:
            return
        for sock in (listener, *self._sockets.copy()):
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        listener.close()
        self._sockets.clear()

    def _serve(self, listener: socket.socket) -> None:
        while True:
            try:
                incoming, _ = listener.accept()
            except OSError:
                if listener.fileno() < 0 or listener is not self._listener:
                    return  # the proxy is closed
                continue  # the client has disconnected already
            try:
                outgoing = socket.create_connection(
                    ("127.0.0.1", self.target_port), START_TIMEOUT_S
                )
                outgoing.settimeout(None)
            except OSError:
                incoming.close()  # else the client would wait for an answer that never comes
                continue
            self._sockets |= {incoming, outgoing}
            threading.Thread(target=self._forward, args=(incoming, outgoing), daemon=True).start()

    def _forward(self, *pair: socket.socket) -> None:
        try:
            while True:
                for sock in select.select(pair, [], [])[0]:
                    data = sock.recv(1 << 16)
                    if not data:
                        return
                    if request := REQUEST.match(data):
                        self.num_requests[request[1].decode()] += 1
                    if get_request := GET.match(data):
                        self.num_fetches[get_request[1].decode()] += 1
                    elif data.startswith(b"PUT "):
                        self.upload_headers.append(
                            data.partition(b"\r\n\r\n")[0].decode(errors="replace")
                        )
                    pair[1 - pair.index(sock)].sendall(data)
        except OSError:
            return  # one side has closed the connection, or the proxy is closed
        finally:
            self._sockets -= set(pair)
            for sock in pair:
                sock.close()


@contextmanager
def start_s3_with_credentials() -> Iterator[S3Proxy]:
    """Start an S3 server, and set its credentials in the environment."""
    with pytest.MonkeyPatch.context() as environment, start_s3_server() as proxy:
        for name, value in CREDENTIALS.items():
            environment.setenv(name, value)
        yield proxy


@contextmanager
def start_s3_server() -> Iterator[S3Proxy]:
    """Start an S3 server with an empty bucket; yield its open proxy."""
    port = find_free_port()
    environment = {**os.environ, **CREDENTIALS}
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER, str(port)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=environment,
    )
    proxy = S3Proxy(port)
    try:
        _wait_until_listening(port, server)
        bucket = urllib.request.Request(f"http://127.0.0.1:{port}/bucket", method="PUT")
        urllib.request.urlopen(bucket).close()
        proxy.open()
        yield proxy
        proxy.close()
    finally:
        server.send_signal(signal.SIGKILL)
        server.wait()


def find_unused_port() -> int:
    """Find a port below the ephemeral range: no process takes it while the proxy is closed."""
    while True:
        port = random.randrange(24_000, 32_000)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def find_free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    return port


def _wait_until_listening(port: int, server: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1.0).close()
            return
        except OSError:
            assert server.poll() is None, "the server ended"
            assert time.monotonic() < deadline, "the server does not listen"
            time.sleep(0.1)
