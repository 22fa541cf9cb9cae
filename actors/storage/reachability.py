"""A bounded check that the endpoint of an object store accepts connections, before retries."""

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
    """Raises OSError if the endpoint of an s3:// URL accepts no connection in `KNOCK_TIMEOUT_S`.

    Arrow itself retries for more than 20 s. If connections go through a proxy, or the endpoint is
    unknown, the URL is accepted.
    """
    endpoint = endpoint_of(url)
    if endpoint is None or any(os.environ.get(name) for name in PROXIES):
        return
    host, port = endpoint
    failure: list[OSError] = []
    attempt = threading.Thread(target=_try_to_connect, args=(host, port, failure), daemon=True)
    attempt.start()
    attempt.join(KNOCK_TIMEOUT_S + 0.5)  # resolving a name may take longer than connecting
    if failure:
        raise OSError(f"{host}:{port}: {failure[0].strerror or failure[0]}")
    if attempt.is_alive():
        raise OSError(f"{host}:{port}: no answer within {KNOCK_TIMEOUT_S:g} s")


def _try_to_connect(host: str, port: int, failure: list[OSError]) -> None:
    try:
        socket.create_connection((host, port), KNOCK_TIMEOUT_S).close()
    except OSError as error:
        failure.append(error)
    except ValueError as error:  # a name that no resolver accepts, or a port over 65535
        failure.append(OSError(str(error)))


def endpoint_of(url: str) -> tuple[str, int] | None:
    """Host and port of a URL's object store: from its query, the environment, or AWS's region.

    None if the URL is not s3://, or only the SDK's configuration file can name the endpoint.
    Raises OSError for an endpoint with an invalid port.
    """
    parts = urlsplit(url)
    if parts.scheme != "s3":
        return None
    query = dict(parse_qsl(parts.query))
    region = query.get("region") or _first_in_environment(REGIONS)
    endpoint = query.get("endpoint_override") or _first_in_environment(ENDPOINTS)
    if not endpoint and not region and _has_configuration():
        return None
    endpoint = endpoint or (_aws_endpoint(region) if region else "s3.amazonaws.com")
    address = urlsplit(endpoint if "://" in endpoint else f"https://{endpoint}")
    try:
        port = address.port
    except ValueError as error:
        raise OSError(f"{endpoint}: {error}") from None
    return address.hostname or "", port or (80 if address.scheme == "http" else 443)


def _first_in_environment(names: tuple[str, ...]) -> str | None:
    return next((os.environ[name] for name in names if os.environ.get(name)), None)


def _aws_endpoint(region: str) -> str:
    return f"s3.{region}.amazonaws.com{'.cn' if region.startswith('cn-') else ''}"


def _has_configuration() -> bool:
    """Whether the SDK has a configuration file, which may name a region or an endpoint."""
    file = os.environ.get("AWS_CONFIG_FILE") or "~/.aws/config"
    return Path(os.path.expanduser(file)).exists()
