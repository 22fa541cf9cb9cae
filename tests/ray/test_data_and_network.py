"""`elastic train` on a real Ray cluster with data at a URL, one interface and a port range."""

from __future__ import annotations

import sys
from pathlib import Path

import psutil
import pytest
from command_line import elastic, elastic_train, processes_of
from shared_cluster import elastic_train as train_on_shared_cluster

sys.path.append(str(Path(__file__).parents[1] / "processes"))
from s3 import CREDENTIALS, start_s3_server

pytestmark = [pytest.mark.timeout(900), pytest.mark.soak]
PORTS = (22_000, 22_999)
TINY = ("tiny", "--set", "dtype=float64", "--layout", "fsdp=2", "--workers", "2:2")


def find_listeners(ray_folder: str, name: str) -> set[tuple[str, int]]:
    """Find the addresses where the actors of a kind listen."""
    actors = [process for process in processes_of(ray_folder) if name in process.name()]
    sockets = [socket for process in actors for socket in process.net_connections("tcp")]
    return {tuple(socket.laddr) for socket in sockets if socket.status == psutil.CONN_LISTEN}


def test_data_prepared_at_a_url_give_the_losses_of_a_local_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    text, cache = tmp_path / "text.txt", tmp_path / "cache"
    text.write_text("\n".join(f"{number} and {number * number}" for number in range(3000)))
    with start_s3_server() as server:
        url = server.url_of("data")
        ended = elastic("prepare", str(text), url)
        assert ended.returncode == 0, ended.stderr
        data = ("--data", url, "--set", f"cache.folder={cache}", "--steps", "60")
        network = ("--interface", "lo", "--ports", "{}:{}".format(*PORTS))
        with elastic_train(tmp_path / "there", *TINY, *data, *network) as command:
            command.wait_until(lambda: command.lines("SnapshotServerReady"), "snapshots")
            command.wait_for_step(5)
            listening = {
                kind: find_listeners(command.ray_folder, kind)
                for kind in ("RayStore", "RaySnapshotServer")
            }
            code, output = command.finish()
            assert code == 0, output
            losses = [line["loss"] for line in command.metrics()]
            store, snapshot_server = (
                command.lines("StoreReady")[-1],
                command.lines("SnapshotServerReady")[0],
            )
        assert server.num_fetches["train-tokens-00000.arrow"] == 1, (
            "the driver reads only the index"
        )
    expected = {
        (store["host"], store["port"]),
        (snapshot_server["snapshot_server"]["host"], snapshot_server["snapshot_server"]["port"]),
    }
    assert all(host == "127.0.0.1" and PORTS[0] <= port <= PORTS[1] for host, port in expected)
    assert expected <= listening["RayStore"] | listening["RaySnapshotServer"]
    assert ("127.0.0.1", store["port"]) in listening["RayStore"]
    local_data = ("--data", str(text), "--steps", "60")
    with train_on_shared_cluster(tmp_path / "here", *TINY, *local_data) as command:
        code, output = command.finish()
        assert code == 0, output
        assert [line["loss"] for line in command.metrics()] == losses
