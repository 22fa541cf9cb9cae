"""The network of a run: the interface and address that processes use, and the ports they listen on.

Every port that this project opens is opened by `listen`: on one address, within the allowed range.
Gloo and NCCL open ports of their own; `choose_interface` names the interface to them.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass

import psutil

from actors.storage.errors import UnsuitableMachine

BACKLOG = 1024

VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")

DISCARD_PORT = 9
"""A UDP socket is connected to it to learn the route; nothing is sent."""


@dataclass(frozen=True)
class Network:
    """Where processes listen: the interface by name (None: the one on the route to the store), and
    the first and last allowed port (None: any)."""

    interface: str | None = None
    ports: tuple[int, int] | None = None


ANYWHERE = Network()


def listen_address(network: Network, towards: str) -> str:
    """The address on which this machine listens: that of the named interface, or the one on the
    route to the host `towards`.

    Raises `UnsuitableMachine` if there is none.
    """
    if network.interface is None:
        return _address_on_route(towards)
    addresses_by_interface = psutil.net_if_addrs()
    if network.interface not in addresses_by_interface:
        known = ", ".join(sorted(addresses_by_interface))
        raise UnsuitableMachine(
            f"--interface {network.interface}: this machine has no such interface; use one of "
            f"{known}"
        )
    addresses = addresses_by_interface[network.interface]
    for family in (socket.AF_INET, socket.AF_INET6):
        for entry in addresses:
            if entry.family == family and not entry.address.startswith("fe80:"):
                return str(entry.address)
    raise UnsuitableMachine(f"--interface {network.interface}: the interface has no address here")


def _address_on_route(host: str) -> str:
    try:
        infos = socket.getaddrinfo(host, DISCARD_PORT, type=socket.SOCK_DGRAM)
        family, kind, _, _, address = infos[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise UnsuitableMachine(f"this machine has no route to {host} ({error.strerror})") from None


def choose_interface(network: Network, towards: str) -> None:
    """Name the interface to Gloo and NCCL, unless the user's environment names one and no option
    does. Raises `UnsuitableMachine`.

    Without it Gloo resolves the host's name, which takes 0.6 s or fails (FACTS: process groups).
    """
    address = listen_address(network, towards)
    if network.interface is not None:
        os.environ.update(dict.fromkeys(VARIABLES, network.interface))
        return
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in addresses):
            for variable in VARIABLES:
                os.environ.setdefault(variable, name)


def listen(host: str, network: Network = ANYWHERE) -> socket.socket:
    """A listening socket on a free port. Raises `UnsuitableMachine` if there is none."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    first, last = network.ports or (0, 0)
    for port in range(first, last + 1):
        try:
            return socket.create_server((host, port), family=family, backlog=BACKLOG)
        except OSError as error:
            cause = error.strerror
    raise UnsuitableMachine(
        f"--ports {first}:{last}: no port of the range can be opened at {host} ({cause}); "
        "choose another range"
    )
