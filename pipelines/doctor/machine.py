"""This machine: how processes find each other, and how much they may open and keep."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path
from shutil import disk_usage

import psutil

from actors.runtime.network import Network, listen, own_address
from actors.storage.errors import UnfitMachine
from pipelines.doctor.finding import BOUNDS, Bounds, Finding, judged
from pipelines.observe.history.formatting import quantity

SHARED_MEMORY = Path("/dev/shm")


def network(network: Network, towards: str) -> Iterator[Finding]:
    """The interface on the route to a host, and whether its ports can be listened on."""
    try:
        address = own_address(network, towards)
    except UnfitMachine as error:
        yield Finding("interface", str(error), "failed", "name one that is there by --interface")
        return
    names = [
        name
        for name, there in psutil.net_if_addrs().items()
        if any(entry.address == address for entry in there)
    ]
    yield Finding("interface", f"{', '.join(names) or 'unknown'} ({address}), towards {towards}")
    try:
        listener = listen(address, network)
    except UnfitMachine as error:
        yield Finding("ports", str(error), "failed", "allow others by --ports")
        return
    port = listener.getsockname()[1]
    listener.close()
    allowed = "any" if network.ports is None else f"{network.ports[0]} to {network.ports[1]}"
    yield Finding("ports", f"{allowed}; {port} was listened on")


def limits() -> Iterator[Finding]:
    """Of open files, shared memory and swap."""
    yield open_files(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    if SHARED_MEMORY.is_dir():
        yield shared_memory(disk_usage(SHARED_MEMORY).total)
    yield swap(psutil.swap_memory().used, psutil.virtual_memory().total)


def open_files(limit: int, bounds: Bounds = BOUNDS) -> Finding:
    if limit == resource.RLIM_INFINITY:
        return Finding("open files", "without limit")
    verdict = judged(limit, bounds.open_files)
    mend = "" if verdict == "ok" else "ulimit -n 65536, or LimitNOFILE= of the service"
    return Finding("open files", f"{limit:,} a process", verdict, mend)


def shared_memory(num_bytes: int, bounds: Bounds = BOUNDS) -> Finding:
    value = f"{quantity(num_bytes)}B"
    if num_bytes >= bounds.shared_memory_bytes:
        return Finding("/dev/shm", value)
    mend = "Ray's objects and NCCL live there: docker run --shm-size=8g, or an emptyDir of Memory"
    return Finding("/dev/shm", value, "warning", mend)


def swap(used_bytes: int, memory_bytes: int, bounds: Bounds = BOUNDS) -> Finding:
    value = f"{quantity(used_bytes)}B in use, {quantity(memory_bytes)}B of memory"
    if used_bytes <= bounds.swap_used_share * memory_bytes:
        return Finding("swap", value)
    mend = "a worker that is swapped out slows all: free memory, or `swapoff -a`"
    return Finding("swap", value, "warning", mend)


def free_disk(folder: Path, bounds: Bounds = BOUNDS) -> Finding:
    """Of the file system that a folder lies on, or will."""
    free = disk_usage(folder).free
    verdict = judged(free, bounds.disk_bytes)
    mend = "" if verdict == "ok" else "checkpoints need room: free some, or name another --storage"
    return Finding("free disk", f"{quantity(free)}B at {folder}", verdict, mend)
