"""Connection to a Ray cluster: joining one by its address, and what this machine would be in it.

Each way in which joining fails has an error of one line.
"""

from __future__ import annotations

import os
import socket
from typing import Any

import psutil
import ray

from actors.ray_backend.cluster.ray_private import recorded_address, take_token
from actors.storage.errors import ClusterNotJoined

LOCAL = "local"
KNOCK_TIMEOUT_S = 2.0
MAX_MESSAGE = 300


def join(address: str | None, common: dict[str, Any]) -> bool:
    """Join the cluster at `address`, or the one that `ray start` recorded; return whether joined.

    Ray's own "auto" would also join a private cluster of another command. Raises OSError if an
    address is given and nothing answers there, `ClusterNotJoined` if Ray cannot join.
    """
    if address not in (None, "", "auto"):
        check_reachable(address)
        _init_joined(address, common)
        return True
    recorded = recorded_address()
    try:
        if recorded is None:
            raise ConnectionError("no `ray start` has recorded a cluster on this machine")
        check_reachable(recorded)
        take_token()
        _init_joined(recorded, common)
    except ClusterNotJoined:
        raise
    except OSError:  # for example the record of a cluster that was killed
        if address:
            raise
        return False
    return True


def _init_joined(address: str, common: dict[str, Any]) -> None:
    """Raises OSError if nothing answers, `ClusterNotJoined` for any other failure."""
    try:
        ray.init(address=address, **common)
    except OSError:
        raise
    except Exception as error:  # another version is a RuntimeError, another token a RayError
        ray.shutdown()
        raise ClusterNotJoined(f"{address}: {in_one_line(error)}") from error


def check_reachable(address: str) -> None:
    """Check that something listens at the address; Ray itself would try for more than a minute.
    Raises OSError if nothing listens there."""
    host, colon, port = address.rpartition("://")[2].partition("/")[0].rpartition(":")
    if colon and port.isdecimal():
        try:
            socket.create_connection((host.strip("[]"), int(port)), KNOCK_TIMEOUT_S).close()
        except (ValueError, OverflowError) as error:  # an invalid host name or port
            raise OSError(str(error)) from None


def in_one_line(error: Exception) -> str:
    """The message of a Ray error, which may have many lines, in one line."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= MAX_MESSAGE else f"{text[:MAX_MESSAGE]}..."


def will_be_private() -> bool:
    """Whether a run would start a private cluster, which ends with this process."""
    return not ray.is_initialized() and _address() == LOCAL


def will_be_head() -> bool:
    """Whether this machine is, or would be, the head of the cluster."""
    host = _address().rpartition("://")[2].rpartition(":")[0].strip("[]")
    here = {entry.address for entries in psutil.net_if_addrs().values() for entry in entries}
    return will_be_private() or host in here | {"localhost"}


def own_node_address() -> str:
    """The address of this machine as a node of a cluster."""
    address: str = ray.util.get_node_ip_address()
    return address


def _address() -> str:
    """The address of the cluster that this process has joined, or would join."""
    if ray.is_initialized():
        address: str = ray.get_runtime_context().gcs_address
        return address
    named = os.environ.get("RAY_ADDRESS")
    return (None if named == "auto" else named) or recorded_address() or LOCAL
