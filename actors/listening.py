"""Listening: every port that we open ourselves, on one address, out of the range allowed."""

from __future__ import annotations

import socket
from dataclasses import dataclass

from actors.errors import UnfitMachine

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
