"""Addresses where the processes of a run listen: one interface; store and snapshot servers use only
the allowed ports."""

from __future__ import annotations

from pathlib import Path

import psutil
from harness import run_in_processes

from actors.runtime.network import Network
from elastic.protocol.events import Event, StepCommitted
from elastic.protocol.snapshot_events import SnapshotServerReady
from pipelines.run.recipes import tiny
from pipelines.settings.overrides import override

PORTS = (21_000, 21_999)


def find_listeners() -> dict[int, set[tuple[str, int]]]:
    """Find the addresses where child processes listen, by process id."""
    addresses_of: dict[int, set[tuple[str, int]]] = {}
    for child in psutil.Process().children(recursive=True):
        connections = child.net_connections("tcp")
        addresses = {
            (connection.laddr.ip, connection.laddr.port)
            for connection in connections
            if connection.status == psutil.CONN_LISTEN
        }
        if addresses:
            addresses_of[child.pid] = addresses
    return addresses_of


def test_store_and_snapshot_servers_listen_on_allowed_ports_of_one_interface(
    tmp_path: Path,
) -> None:
    addresses_of: dict[int, set[tuple[str, int]]] = {}
    num_servers = 0

    def record_listeners(event: Event) -> None:
        nonlocal num_servers
        num_servers += isinstance(event, SnapshotServerReady)
        if isinstance(event, StepCommitted) and num_servers == 2 and not addresses_of:
            addresses_of.update(find_listeners())

    outcome = run_in_processes(
        tmp_path / "run",
        override(tiny(), ["data.source=random", "steps=300"]),
        2,
        layout="fsdp=2",
        node_of=lambda worker: f"n-{worker}",
        snapshot_every=1,
        network=Network("lo", PORTS),
        on_event=record_listeners,
    )
    assert outcome.stopped.outcome == "completed", outcome.stopped
    [store] = outcome.lines_of("StoreReady")[-1:]
    snapshot_servers = [line["snapshot_server"] for line in outcome.lines_of("SnapshotServerReady")]
    assert len(snapshot_servers) == 2
    reported = {(store["host"], store["port"])} | {
        (server["host"], server["port"]) for server in snapshot_servers
    }
    assert all(host == "127.0.0.1" and PORTS[0] <= port <= PORTS[1] for host, port in reported)
    listened = {
        address
        for addresses in addresses_of.values()
        for address in addresses
        if address in reported
    }
    assert listened == reported, "a child process listens at each of them"
    hosts = {host for addresses in addresses_of.values() for host, _ in addresses}
    assert hosts == {"127.0.0.1"}, "also Gloo, on ports that the kernel chooses"
