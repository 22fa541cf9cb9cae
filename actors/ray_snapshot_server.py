"""A node's snapshot server as a Ray actor. It imports no torch, to start fast and stay small."""

from __future__ import annotations

import threading
from typing import ClassVar

import ray

from actors.interface import own_address
from actors.keeper import KeeperServer
from actors.listening import Network
from actors.orphanage import Orphanage, end_process
from actors.ray_place import head_host, place_here
from elastic.events import KeeperTold
from elastic.keeping import Keeper


class RaySnapshotServer:
    """Listens from its start on, and keeps nothing until workers send snapshots."""

    GROUPS: ClassVar = {"life": 1}

    def __init__(
        self,
        network: Network,
        secret: bytes,
        max_snapshot_bytes: int | None,
        orphan_timeout_s: float,
    ) -> None:
        self._orphanage = Orphanage(orphan_timeout_s)
        place, host = place_here(), own_address(network, head_host())
        self._server = KeeperServer(
            place.node, place.rack, host, secret, network, max_snapshot_bytes
        )

    def keeper(self) -> Keeper:
        return self._server.keeper

    def told(self, generation: int) -> KeeperTold:
        return self._server.told(generation)

    def forget(self, generation: int) -> None:
        self._server.forget(generation)

    def hear(self) -> None:
        self._orphanage.hear()

    def end(self) -> None:
        """What `ray.kill` does, also without Ray's GCS."""
        end_process()

    @ray.method(concurrency_group="life")
    def live(self) -> None:
        threading.Event().wait()
