"""Whether anybody answers at the address of an object store: a bounded look, before retries."""

from __future__ import annotations

import os
import socket
import threading
from urllib.parse import parse_qsl, urlsplit

KNOCK_TIMEOUT_S = 2.0
ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
PROXIES = ("https_proxy", "HTTPS_PROXY", "http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY")


def refuse_unreachable(url: str) -> None:
    """Raises OSError if an s3:// URL, or the environment, names an endpoint and nobody accepts a
    connection there within `KNOCK_TIMEOUT_S`.

    Arrow tries for more than 20 s. Where no endpoint is named, or connections go through a proxy,
    it is not known whom to ask, and nothing is refused.
    """
    endpoint = _endpoint(url)
    if endpoint is None or any(os.environ.get(name) for name in PROXIES):
        return
    host, port = endpoint
    failure: list[OSError] = []
    knocked = threading.Thread(target=_knock, args=(host, port, failure), daemon=True)
    knocked.start()
    knocked.join(KNOCK_TIMEOUT_S + 0.5)  # a name may take longer to resolve than a connection
    if failure:
        raise OSError(f"{host}:{port}: {failure[0].strerror or failure[0]}")
    if knocked.is_alive():
        raise OSError(f"{host}:{port}: no answer within {KNOCK_TIMEOUT_S:g} s")


def _knock(host: str, port: int, failure: list[OSError]) -> None:
    try:
        socket.create_connection((host, port), KNOCK_TIMEOUT_S).close()
    except OSError as error:
        failure.append(error)
    except ValueError as error:  # a name that no resolver takes, or a port over 65535
        failure.append(OSError(str(error)))


def _endpoint(url: str) -> tuple[str, int] | None:
    parts = urlsplit(url)
    if parts.scheme != "s3":
        return None
    named = dict(parse_qsl(parts.query)).get("endpoint_override")
    named = named or next((os.environ[name] for name in ENDPOINTS if os.environ.get(name)), None)
    if not named:
        return None
    place = urlsplit(named if "://" in named else f"https://{named}")
    try:
        port = place.port
    except ValueError as error:
        raise OSError(f"{named}: {error}") from None
    return place.hostname or "", port or (80 if place.scheme == "http" else 443)
