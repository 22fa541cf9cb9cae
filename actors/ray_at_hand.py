"""Which Ray cluster a run would use from this process, found without joining it."""

from __future__ import annotations

import os

import psutil
import ray

from actors.ray_private import recorded_address

LOCAL = "local"


def will_be_private() -> bool:
    """Whether a run would start a cluster of its own, which ends with this process."""
    return not ray.is_initialized() and _address() == LOCAL


def will_be_head() -> bool:
    """Whether this machine is, or would be, the head of the cluster."""
    host = _address().rpartition("://")[2].rpartition(":")[0].strip("[]")
    here = {entry.address for entries in psutil.net_if_addrs().values() for entry in entries}
    return will_be_private() or host in here | {"localhost"}


def own_node_address() -> str:
    """The address by which a cluster would know this machine."""
    address: str = ray.util.get_node_ip_address()
    return address


def _address() -> str:
    if ray.is_initialized():
        address: str = ray.get_runtime_context().gcs_address
        return address
    named = os.environ.get("RAY_ADDRESS")
    return (None if named == "auto" else named) or recorded_address() or LOCAL
