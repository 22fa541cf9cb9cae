"""What a run's processes listen on: one interface, and of ours only the ports that are allowed."""

from __future__ import annotations

from pathlib import Path

import psutil
from harness import run_in_processes

from actors.runtime.network import Network
from elastic.protocol.events import Event, StepCommitted
from pipelines.run.recipes import tiny
from pipelines.settings.overrides import override

PORTS = (21_000, 21_999)


def listeners() -> dict[int, set[tuple[str, int]]]:
    """Addresses at which descendants of this process listen, by process."""
    found: dict[int, set[tuple[str, int]]] = {}
    for child in psutil.Process().children(recursive=True):
        there = child.net_connections("tcp")
        at = {(one.laddr.ip, one.laddr.port) for one in there if one.status == psutil.CONN_LISTEN}
        if at:
            found[child.pid] = at
    return found


def test_store_and_keepers_listen_in_the_range_and_all_on_one_interface(tmp_path: Path) -> None:
    seen: dict[int, set[tuple[str, int]]] = {}

    def look(event: Event) -> None:
        if isinstance(event, StepCommitted) and event.record.step == 5:
            seen.update(listeners())

    outcome = run_in_processes(
        tmp_path / "run",
        override(tiny(), ["data.source=random", "steps=8"]),
        2,
        layout="fsdp=2",
        node_of=lambda worker: f"n-{worker}",
        snapshot_every=1,
        network=Network("lo", PORTS),
        on_event=look,
    )
    assert outcome.stopped.outcome == "completed", outcome.stopped
    [store] = outcome.lines_of("StoreReady")[-1:]
    snapshot_servers = [line["snapshot_server"] for line in outcome.lines_of("SnapshotServerReady")]
    assert len(snapshot_servers) == 2
    told = {(store["host"], store["port"])} | {
        (one["host"], one["port"]) for one in snapshot_servers
    }
    assert all(host == "127.0.0.1" and PORTS[0] <= port <= PORTS[1] for host, port in told)
    ours = {at for of_one in seen.values() for at in of_one if at in told}
    assert ours == told, "each is a socket of a child, listening there and nowhere else"
    everywhere = {host for of_one in seen.values() for host, _ in of_one}
    assert everywhere == {"127.0.0.1"}, "Gloo too, on ports that the kernel gives"
