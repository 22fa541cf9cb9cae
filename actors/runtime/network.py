"""Listening: every port that we open ourselves, on one address, out of the range allowed."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass

import psutil

from actors.storage.errors import UnfitMachine

BACKLOG = 1024


@dataclass(frozen=True)
class Network:
    """Where processes listen: the interface by name (None: the one on the route to the store), and
    the first and last port allowed (None: any)."""

    interface: str | None = None
    ports: tuple[int, int] | None = None


ANYWHERE = Network()


def listen(host: str, network: Network = ANYWHERE) -> socket.socket:
    """A listening socket on a free port. Raises `UnfitMachine` if there is none."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    first, last = network.ports or (0, 0)
    for port in range(first, last + 1):
        try:
            return socket.create_server((host, port), family=family, backlog=BACKLOG)
        except OSError as error:
            cause = error.strerror
    raise UnfitMachine(
        f"--ports {first}:{last}: none of them can be listened on at {host} ({cause}); allow others"
    )


VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")

DISCARD_PORT = 9
"""Nothing is sent there: it is only asked how it would go."""


def own_address(network: Network, towards: str) -> str:
    """The address of this machine to listen on: of the interface named, or on the route to a host.

    Raises `UnfitMachine` if there is none.
    """
    if network.interface is None:
        return _address_on_route(towards)
    of_all = psutil.net_if_addrs()
    if network.interface not in of_all:
        known = ", ".join(sorted(of_all))
        raise UnfitMachine(
            f"--interface {network.interface}: this machine has none of that name; it has {known}"
        )
    there = of_all[network.interface]
    for family in (socket.AF_INET, socket.AF_INET6):
        for entry in there:
            if entry.family == family and not entry.address.startswith("fe80:"):
                return str(entry.address)
    raise UnfitMachine(f"--interface {network.interface}: it has no address on this machine")


def choose_interface(network: Network, towards: str) -> None:
    """Name the interface to Gloo and NCCL, unless the user's environment has named one and no
    option does. Raises `UnfitMachine`.

    Without it Gloo resolves the host's name, which takes 0.6 s or fails (FACTS: process groups).
    """
    address = own_address(network, towards)
    if network.interface is not None:
        os.environ.update(dict.fromkeys(VARIABLES, network.interface))
        return
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in addresses):
            for variable in VARIABLES:
                os.environ.setdefault(variable, name)


def _address_on_route(host: str) -> str:
    try:
        family, kind, _, _, there = socket.getaddrinfo(host, DISCARD_PORT, type=socket.SOCK_DGRAM)[
            0
        ]
        with socket.socket(family, kind) as asked:
            asked.connect(there)
            return str(asked.getsockname()[0])
    except OSError as error:
        raise UnfitMachine(f"this machine has no route to {host} ({error.strerror})") from None
