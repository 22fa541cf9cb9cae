"""Files at URLs that change at equal size are noticed by a checksum or a time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from actors.storage.errors import FileChanged
from actors.storage.remote_files import RemoteFile, remote_files
from actors.storage.storage import retry
from pipelines.data.cache import LocalCopies
from pipelines.data.corpus import find_corpus
from pipelines.settings import CacheSettings

FIRST, SECOND = b"first text", b"other text"


class OneFile(BaseHTTPRequestHandler):
    """Serves one content under each path, with what `headers` says of it."""

    def __init__(self, site: Site, *args: object) -> None:
        self.site = site
        super().__init__(*args)  # type: ignore[arg-type]

    def do_HEAD(self) -> None:
        self._answer(b"")

    def do_GET(self) -> None:
        self._answer(self.site.content)

    def _answer(self, body: bytes) -> None:
        self.send_response_only(200)
        self.send_header("Content-Length", str(len(self.site.content)))
        for name, value in self.site.headers(self.site.content).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Without a log."""


class Site:
    def __init__(self, headers: Callable[[bytes], dict[str, str]]) -> None:
        self.content, self.headers, self.url = FIRST, headers, ""

    @contextmanager
    def served(self) -> Iterator[Site]:
        server = ThreadingHTTPServer(("127.0.0.1", 0), partial(OneFile, self))
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        self.url = f"http://127.0.0.1:{server.server_address[1]}/a.txt"
        try:
            yield self
        finally:
            server.shutdown()
            thread.join()
            server.server_close()


def etag(content: bytes) -> dict[str, str]:
    return {"ETag": f'"{content.hex()}"', "Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT"}


def time_only(content: bytes) -> dict[str, str]:
    return {"Last-Modified": f"Thu, 01 Jan 2026 00:00:0{int(content == SECOND)} GMT"}


def nothing(content: bytes) -> dict[str, str]:
    return {}


def listed(site: Site) -> RemoteFile:
    [file] = remote_files(site.url)
    return file


@pytest.mark.parametrize("headers", [etag, time_only])
def test_changed_file_of_equal_size_is_copied_and_prepared_again(
    headers: Callable[[bytes], dict[str, str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Site(headers).served() as site:
        copies = LocalCopies(CacheSettings(folder=str(tmp_path)))
        first, corpus = listed(site), find_corpus(site.url)
        assert copies.path_of(first).read_bytes() == FIRST
        assert listed(site) == first and find_corpus(site.url).fingerprint() == corpus.fingerprint()
        site.content = SECOND
        assert copies.path_of(listed(site)).read_bytes() == SECOND
        assert find_corpus(site.url).fingerprint() != corpus.fingerprint()
    assert not capsys.readouterr().err


def test_file_that_changes_between_listing_and_copying_is_refused_at_once(tmp_path: Path) -> None:
    with Site(etag).served() as site:
        file = listed(site)
        site.content = SECOND
        with pytest.raises(FileChanged, match="has changed since it was listed"):
            retry(file.read_bytes, 600)


def test_store_without_checksums_and_times_is_reported_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with Site(nothing).served() as site:
        assert listed(site) == listed(site)
        [line] = capsys.readouterr().err.splitlines()
        assert line.startswith(f"elastic: {site.url[:-6]}: the store reports neither a checksum")
        assert listed(site).read_bytes() == FIRST
