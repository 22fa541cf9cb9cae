"""A fake of the clouds' metadata servers, on loopback: it answers what a test tells it to."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

TOKEN_PATH = "/latest/api/token"


@dataclass
class Metadata:
    """What it has by path, what a request must say to be answered, and what was asked."""

    has: dict[str, str] = field(default_factory=dict)
    wants: dict[str, str] = field(default_factory=dict)
    token: str = ""
    """AWS's: given on PUT, and wanted from then on."""
    address: str = ""
    asked: list[str] = field(default_factory=list)


@contextmanager
def metadata_server(metadata: Metadata) -> Iterator[Metadata]:
    """Serve it on a free port, which goes into its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_PUT(self) -> None:
            has_life = self.headers.get("X-aws-ec2-metadata-token-ttl-seconds", "").isdecimal()
            is_token = self.path == TOKEN_PATH and has_life and metadata.token
            self._answer(200 if is_token else 403, metadata.token)

        def do_GET(self) -> None:
            metadata.asked.append(self.path)
            wants = dict(metadata.wants)
            if metadata.token:
                wants["X-aws-ec2-metadata-token"] = metadata.token
            if any(self.headers.get(name) != value for name, value in wants.items()):
                self._answer(401 if metadata.token else 403, "")
            elif self.path in metadata.has:
                self._answer(200, metadata.has[self.path])
            else:
                self._answer(404, "")

        def _answer(self, code: int, body: str) -> None:
            self.send_response(code)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_: object) -> None:
            """Nobody reads it."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        metadata.address = f"http://127.0.0.1:{server.server_port}"
        serving = threading.Thread(target=server.serve_forever, args=(0.01,))
        serving.start()
        try:
            yield metadata
        finally:
            server.shutdown()
            serving.join()
