"""What a worker found out about its machine before it joined."""

from __future__ import annotations

from dataclasses import dataclass

from elastic.geometry.topology import Place


@dataclass(frozen=True, slots=True)
class MachineReport:
    """The measured speed and the identity of a worker's device, and the address of its link server.

    0 or empty: not measured, not known, or no server.
    """

    product_s: float = 0.0
    """The seconds of one matrix product, the same for each device of a kind."""
    processor: str = ""
    """The kind of device whose speed it is."""
    device_id: str = ""
    """What no other worker may have, too: two processes must not train on one GPU."""
    host: str = ""
    port: int = 0


@dataclass(frozen=True, slots=True)
class Peer:
    """A member whose link server answers a new worker's probes."""

    node: str
    rack: str
    host: str
    port: int

    @property
    def place(self) -> Place:
        return Place(self.node, self.rack)

    @property
    def address(self) -> tuple[str, int]:
        return self.host, self.port
