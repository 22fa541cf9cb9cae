"""Checks of this machine: network interface, ports, open files, shared memory, swap and disk."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path
from shutil import disk_usage

import psutil
import torch

from actors.health.device_errors import DeviceErrors
from actors.health.device_speed import check_memory, processor_of, time_product
from actors.runtime.network import Network, listen, listen_address
from actors.storage.errors import UnhealthyMachine, UnsuitableMachine
from pipelines.doctor.finding import BOUNDS, Bounds, Finding, verdict_of
from pipelines.observe.history.formatting import quantity

SHARED_MEMORY = Path("/dev/shm")


def network(network: Network, towards: str) -> Iterator[Finding]:
    """The interface on the route to a host, and whether a process can listen on its ports."""
    try:
        address = listen_address(network, towards)
    except UnsuitableMachine as error:
        yield Finding("interface", str(error), "failed", "give an existing one with --interface")
        return
    names = [
        name
        for name, addresses in psutil.net_if_addrs().items()
        if any(entry.address == address for entry in addresses)
    ]
    yield Finding("interface", f"{', '.join(names) or 'unknown'} ({address}), route to {towards}")
    try:
        listener = listen(address, network)
    except UnsuitableMachine as error:
        yield Finding("ports", str(error), "failed", "allow other ports with --ports")
        return
    port = listener.getsockname()[1]
    listener.close()
    allowed = "any" if network.ports is None else f"{network.ports[0]} to {network.ports[1]}"
    yield Finding("ports", f"{allowed}; listened on {port}")


def devices() -> Iterator[Finding]:
    """The checks of a device that a worker passes before it joins, of each GPU or of the CPU."""
    names = [f"cuda:{index}" for index in range(torch.cuda.device_count())] or ["cpu"]
    for device in map(torch.device, names):
        fix = "see docs/watching.md; no worker may train on this device"
        try:
            check_memory(device)
            product_s = time_product(device)
        except UnhealthyMachine as unhealthy:
            yield Finding(f"health of {device}", str(unhealthy), "failed", fix)
            continue
        if error := DeviceErrors(device).lasting():
            yield Finding(f"health of {device}", error, "failed", fix)
            continue
        speed = f"{processor_of(device)}, {1e3 * product_s:.2g} ms for a matrix product"
        yield Finding(f"health of {device}", speed)


def limits() -> Iterator[Finding]:
    """The limits of open files and shared memory, and the use of swap."""
    yield open_files(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    if SHARED_MEMORY.is_dir():
        yield shared_memory(disk_usage(SHARED_MEMORY).total)
    yield swap(psutil.swap_memory().used, psutil.virtual_memory().total)


def open_files(limit: int, bounds: Bounds = BOUNDS) -> Finding:
    if limit == resource.RLIM_INFINITY:
        return Finding("open files", "no limit")
    verdict = verdict_of(limit, bounds.open_files)
    fix = "" if verdict == "ok" else "run `ulimit -n 65536`, or set LimitNOFILE= of the service"
    return Finding("open files", f"{limit:,} per process", verdict, fix)


def shared_memory(num_bytes: int, bounds: Bounds = BOUNDS) -> Finding:
    value = f"{quantity(num_bytes)}B"
    if num_bytes >= bounds.shared_memory_bytes:
        return Finding("/dev/shm", value)
    fix = "Ray and NCCL need it: use docker run --shm-size=8g, or an emptyDir with medium: Memory"
    return Finding("/dev/shm", value, "warning", fix)


def swap(used_bytes: int, memory_bytes: int, bounds: Bounds = BOUNDS) -> Finding:
    value = f"{quantity(used_bytes)}B in use, {quantity(memory_bytes)}B of memory"
    if used_bytes <= bounds.swap_used_share * memory_bytes:
        return Finding("swap", value)
    fix = "a swapped-out worker slows down all others: free memory, or run `swapoff -a`"
    return Finding("swap", value, "warning", fix)


def free_disk(folder: Path, bounds: Bounds = BOUNDS) -> Finding:
    """The free space of the file system of a folder."""
    free = disk_usage(folder).free
    verdict = verdict_of(free, bounds.disk_bytes)
    fix = "" if verdict == "ok" else "checkpoints need space: free some, or use another --storage"
    return Finding("free disk", f"{quantity(free)}B at {folder}", verdict, fix)
