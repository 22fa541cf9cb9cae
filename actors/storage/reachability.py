"""Whether anybody answers at the address of an object store: a bounded look, before retries."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

KNOCK_TIMEOUT_S = 2.0
ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
REGIONS = ("AWS_REGION", "AWS_DEFAULT_REGION")
PROXIES = ("https_proxy", "HTTPS_PROXY", "http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY")


def refuse_unreachable(url: str) -> None:
    """Raises OSError if nobody accepts a connection at the endpoint of an s3:// URL within
    `KNOCK_TIMEOUT_S`.

    Arrow tries for more than 20 s. Where connections go through a proxy, or the endpoint is not
    known, nothing is refused.
    """
    endpoint = endpoint_of(url)
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


def endpoint_of(url: str) -> tuple[str, int] | None:
    """Host and port of the object store of a URL: what its query or the environment names, or
    Amazon's of the region; None if it is not s3://, or only the SDK's configuration file says.

    Raises OSError for an endpoint with a port that is none.
    """
    parts = urlsplit(url)
    if parts.scheme != "s3":
        return None
    query = dict(parse_qsl(parts.query))
    region = query.get("region") or _of_environment(REGIONS)
    named = query.get("endpoint_override") or _of_environment(ENDPOINTS)
    if not named and not region and _has_configuration():
        return None
    named = named or (_of_amazon(region) if region else "s3.amazonaws.com")
    place = urlsplit(named if "://" in named else f"https://{named}")
    try:
        port = place.port
    except ValueError as error:
        raise OSError(f"{named}: {error}") from None
    return place.hostname or "", port or (80 if place.scheme == "http" else 443)


def _of_environment(names: tuple[str, ...]) -> str | None:
    return next((os.environ[name] for name in names if os.environ.get(name)), None)


def _of_amazon(region: str) -> str:
    return f"s3.{region}.amazonaws.com{'.cn' if region.startswith('cn-') else ''}"


def _has_configuration() -> bool:
    """Whether the SDK has a configuration file, which may name a region or an endpoint."""
    file = os.environ.get("AWS_CONFIG_FILE") or "~/.aws/config"
    return Path(os.path.expanduser(file)).exists()
