"""Simulated hosts on one machine: network namespaces with one cable each to a common switch."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest


@dataclass(frozen=True)
class Host:
    """A network namespace with its own addresses, ports and abstract sockets."""

    name: str
    address: str
    cable: str
    """The end of its cable in the switch."""

    @property
    def enter(self) -> tuple[str, ...]:
        """The prefix that runs a command in this namespace, as the same process."""
        return ("nsenter", f"--net=/run/netns/{self.name}")


@dataclass(frozen=True)
class Switch:
    """A bridge in its own namespace."""

    name: str

    def pull(self, host: Host) -> None:
        """Pull a host's cable: packets are lost both ways, and neither side gets an error."""
        ip("-n", self.name, "link", "set", host.cable, "nomaster")

    def plug_in(self, host: Host) -> None:
        ip("-n", self.name, "link", "set", host.cable, "master", "switch")


@contextmanager
def connect_hosts(number: int) -> Iterator[tuple[Switch, list[Host]]]:
    """Connect `number` hosts to one switch; skip the test if the system does not permit it."""
    switch = Switch(f"elastic-{os.getpid()}-switch")
    names = [f"elastic-{os.getpid()}-{i}" for i in range(1, number + 1)]
    hosts = [Host(name, f"10.77.0.{i}", f"cable{i}") for i, name in enumerate(names, 1)]
    namespaces: list[str] = []
    try:
        for name in (switch.name, *names):
            namespaces += _namespace(name)
        _try("-n", switch.name, "link", "add", "switch", "type", "bridge")
        ip("-n", switch.name, "link", "set", "switch", "up")
        for host in hosts:
            _connect(switch, host)
        yield switch, hosts
    finally:
        for name in namespaces:
            ip("netns", "delete", name)


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, timeout=60, capture_output=True)


def _namespace(name: str) -> list[str]:
    _try("netns", "add", name)
    return [name]


def _try(*words: str) -> None:
    try:
        ip(*words)
    except FileNotFoundError:
        pytest.skip("network namespaces need the command `ip` (iproute2)")
    except subprocess.CalledProcessError as error:
        pytest.skip(f"network namespaces are not permitted here: {error.stderr.decode().strip()}")


def _connect(switch: Switch, host: Host) -> None:
    ip(
        *("-n", switch.name, "link", "add", host.cable, "type", "veth"),
        *("peer", "name", "eth0", "netns", host.name),
    )
    switch.plug_in(host)
    ip("-n", switch.name, "link", "set", host.cable, "up")
    for device in ("lo", "eth0"):
        ip("-n", host.name, "link", "set", device, "up")
    ip("-n", host.name, "address", "add", f"{host.address}/24", "dev", "eth0")
    # A process finds its own address by the route to a distant one.
    ip("-n", host.name, "route", "add", "default", "dev", "eth0")
