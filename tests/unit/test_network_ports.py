"""Processes listen only on ports of the allowed range and on the requested interface."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import psutil
import pytest

from actors.distributed.store import open_store
from actors.runtime.network import VARIABLES, Network, choose_interface, listen, listen_address
from actors.snapshots.server import SnapshotServerProcess
from actors.storage.errors import UnsuitableMachine
from pipelines.errors import UserError
from pipelines.run.plan import TrainRequest, make_plan

HOST = "127.0.0.1"


def free_range(num_ports: int) -> tuple[int, int]:
    """The first and last of `num_ports` consecutive free ports of this machine."""
    for first in range(20_000, 32_000, num_ports):
        try:
            for port in range(first, first + num_ports):
                socket.create_server((HOST, port)).close()
        except OSError:
            continue
        return first, first + num_ports - 1
    raise AssertionError("no range of ports is free")


def test_ports_come_from_the_range_until_none_is_free() -> None:
    first, last = free_range(3)
    network = Network(ports=(first, last))
    listener = listen(HOST, network)
    store, snapshot_server = (
        open_store(HOST, network),
        SnapshotServerProcess("n", "", HOST, b"s", network).snapshot_server,
    )
    assert {listener.getsockname()[1], store.port, snapshot_server.port} == set(
        range(first, last + 1)
    )
    with pytest.raises(
        UnsuitableMachine, match=f"--ports {first}:{last}: no port .* at {HOST}"
    ) as refusal:
        listen(HOST, network)
    assert "\n" not in str(refusal.value)
    listener.close()
    with listen(HOST, network) as second_listener:
        assert second_listener.getsockname()[1] == first


def test_address_is_chosen_by_interface_name_or_by_route() -> None:
    assert listen_address(Network("lo"), "192.0.2.1") == HOST
    assert listen_address(Network(), HOST) == HOST
    others = {
        name: entry.address
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family == socket.AF_INET and name != "lo" and psutil.net_if_stats()[name].isup
    }
    for name, address in others.items():
        assert listen_address(Network(name), HOST) == address
        assert listen_address(Network(), address) == address, "the route to this machine itself"


def test_missing_interface_is_refused_in_one_line() -> None:
    with pytest.raises(
        UnsuitableMachine, match=r"--interface eth77: .* no such interface; use .*lo"
    ):
        listen_address(Network("eth77"), HOST)


def test_gloo_and_nccl_variables_name_the_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    choose_interface(Network(), HOST)
    assert [os.environ[variable] for variable in VARIABLES] == ["lo", "lo"]
    monkeypatch.setenv(VARIABLES[0], "mine")
    choose_interface(Network(), HOST)
    assert os.environ[VARIABLES[0]] == "mine", "a variable of the user is kept"
    choose_interface(Network("lo"), HOST)
    assert os.environ[VARIABLES[0]] == "lo", "an option overrides the variable"


def test_network_options_reach_the_workers(tmp_path: Path) -> None:
    request = TrainRequest(
        "tiny", "run", str(tmp_path), data="random", interface="lo", ports="20000:20100"
    )
    options = make_plan(request, num_gpus=0).run.options
    assert options.network == Network("lo", (20000, 20100))


@pytest.mark.parametrize("ports", ["20000", "2:1", "a:b", "0:5", "1:70000"])
def test_invalid_port_range_is_refused(ports: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--ports .*FIRST:LAST") as refusal:
        make_plan(
            TrainRequest("tiny", "run", str(tmp_path), data="random", ports=ports), num_gpus=0
        )
    assert "\n" not in str(refusal.value)
