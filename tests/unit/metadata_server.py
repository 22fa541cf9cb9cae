"""A metadata server like those of the clouds, on loopback, with the answers that a test sets."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

TOKEN_PATH = "/latest/api/token"


@dataclass
class Metadata:
    """Answers by path, the headers that a request must have, and the paths that were requested."""

    answers: dict[str, str] = field(default_factory=dict)
    required_headers: dict[str, str] = field(default_factory=dict)
    token: str = ""
    """The token of AWS: sent on PUT, and required from then on."""
    address: str = ""
    requested_paths: list[str] = field(default_factory=list)


@contextmanager
def metadata_server(metadata: Metadata) -> Iterator[Metadata]:
    """Serve the metadata on a free port, which its address then contains."""

    class Handler(BaseHTTPRequestHandler):
        def do_PUT(self) -> None:
            has_life = self.headers.get("X-aws-ec2-metadata-token-ttl-seconds", "").isdecimal()
            is_token = self.path == TOKEN_PATH and has_life and metadata.token
            self._answer(200 if is_token else 403, metadata.token)

        def do_GET(self) -> None:
            metadata.requested_paths.append(self.path)
            headers = dict(metadata.required_headers)
            if metadata.token:
                headers["X-aws-ec2-metadata-token"] = metadata.token
            if any(self.headers.get(name) != value for name, value in headers.items()):
                self._answer(401 if metadata.token else 403, "")
            elif self.path in metadata.answers:
                self._answer(200, metadata.answers[self.path])
            else:
                self._answer(404, "")

        def _answer(self, code: int, body: str) -> None:
            self.send_response(code)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_: object) -> None:
            """Logs nothing: no test reads it."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        metadata.address = f"http://127.0.0.1:{server.server_port}"
        serving = threading.Thread(target=server.serve_forever, args=(0.01,))
        serving.start()
        try:
            yield metadata
        finally:
            server.shutdown()
            serving.join()
