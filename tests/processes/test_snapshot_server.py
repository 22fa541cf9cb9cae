"""Snapshot servers and their clients: real sockets, real memory, and the loss of a server."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import pytest
import torch

from actors.runtime.handshake import connect_remote, new_secret
from actors.snapshots.memory_layout import read_snapshot
from actors.snapshots.messages import receive_message, send_message
from actors.snapshots.server import SnapshotServerProcess, host_snapshot_server
from actors.snapshots.worker_snapshots import Snapshots
from elastic.geometry.assignment import Assignment
from elastic.geometry.layout import Layout
from elastic.geometry.tensor_specs import TensorSpec
from elastic.protocol.commands import StartSnapshots
from elastic.protocol.snapshot_events import SnapshotServerReady
from elastic.reshard.reshard_plan import CarriedPart
from elastic.reshard.snapshot_placement import SnapshotServer

SPECS = (
    TensorSpec("large", (5_000_000,), fsdp_dim=0),
    TensorSpec("odd", (7, 3), dtype="float64", fsdp_dim=0),
    TensorSpec("scalar", (), dtype="int64"),
    TensorSpec("running", (5,), kind="buffer"),
)
"""20 MB: more than any socket's buffers take."""
ASSIGNMENT = Assignment(3, Layout(), ("w0",))
HOST = "127.0.0.1"
SECRET = new_secret()


class Child:
    """A snapshot server in its own process."""

    def __init__(self, node: str) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["actors.snapshots.server"])
        self.pipe: Connection
        self.pipe, theirs = context.Pipe()
        self.process: BaseProcess = context.Process(
            target=host_snapshot_server, args=(theirs, node, "", HOST, SECRET), daemon=True
        )
        self.process.start()
        ready = self.pipe.recv()
        assert isinstance(ready, SnapshotServerReady)
        self.snapshot_server = ready.snapshot_server

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


@pytest.fixture
def children() -> Iterator[list[Child]]:
    started = [Child("here"), Child("there")]
    yield started
    for child in started:
        child.end()


def random_shard(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {
        "large": torch.rand(5_000_000, generator=generator),
        "odd": torch.rand(7, 3, dtype=torch.float64, generator=generator),
        "scalar": torch.tensor(step),
        "running": torch.rand(5, generator=generator),
    }


def snapshots_at(*snapshot_servers: SnapshotServer, node: str = "here") -> Snapshots:
    snapshots = Snapshots("w0", node, SPECS, every=1, secret=SECRET)
    snapshots.start_snapshots(StartSnapshots(3, ("w0",), (snapshot_servers,)))
    return snapshots


def interrupt_never() -> None:
    pass


def assert_has(snapshot_server: SnapshotServer, step: int, node: str) -> None:
    """Read the snapshot as a worker on `node`: in place or over the network."""
    carried, snapshot_servers = (
        CarriedPart("w0", "w1", snapshot_server.node),
        {snapshot_server.node: snapshot_server},
    )
    tensors = read_snapshot(carried, snapshot_servers, node, SPECS, ASSIGNMENT, step, SECRET)
    for name, tensor in random_shard(step).items():
        assert torch.equal(tensors[name], tensor), name


@pytest.mark.parametrize("reader", ["here", "there", "elsewhere"])
def test_large_part_is_copied_to_both_nodes_and_read_back(
    children: list[Child], reader: str
) -> None:
    local_server, remote_server = (child.snapshot_server for child in children)
    snapshots = snapshots_at(local_server, remote_server)
    for step in (1, 2, 3):
        snapshots.begin(step, ASSIGNMENT, random_shard(step))
        snapshots.await_whole(interrupt_never)
        assert snapshots.are_whole
        snapshots.note_vote(1, 1)
    for snapshot_server in (local_server, remote_server):
        assert_has(snapshot_server, 3, reader)
        assert_has(snapshot_server, 2, reader)
    snapshots.end_generation()


def test_snapshot_under_an_earlier_order_does_not_count_in_votes(children: list[Child]) -> None:
    """The new order is not due at step 2, at which workers without it take another snapshot."""
    snapshots = snapshots_at(children[0].snapshot_server)
    snapshots.begin(1, ASSIGNMENT, random_shard(1))
    snapshots.await_whole(interrupt_never)
    assert snapshots.whole_order == 0
    order = StartSnapshots(3, ("w0",), ((children[0].snapshot_server,),), num_changes=1, every=4)
    snapshots.start_snapshots(order)
    for step in (2, 3):
        snapshots.begin(step, ASSIGNMENT, random_shard(step))
        snapshots.await_whole(interrupt_never)
        assert snapshots.whole_order is None
    snapshots.begin(4, ASSIGNMENT, random_shard(4))
    snapshots.await_whole(interrupt_never)
    assert snapshots.whole_order == 1
    snapshots.end_generation()


def test_worker_without_local_server_sends_to_the_remote_one(children: list[Child]) -> None:
    snapshots = snapshots_at(children[1].snapshot_server)
    snapshots.begin(1, ASSIGNMENT, random_shard(1))
    snapshots.await_whole(interrupt_never)
    assert snapshots.are_whole
    assert_has(children[1].snapshot_server, 1, "there")
    snapshots.end_generation()


def test_complete_snapshot_is_kept_while_later_ones_fail(children: list[Child]) -> None:
    local_server, remote_server = (child.snapshot_server for child in children)
    snapshots = snapshots_at(local_server, remote_server)
    snapshots.begin(1, ASSIGNMENT, random_shard(1))
    snapshots.await_whole(interrupt_never)
    snapshots.note_vote(1, 1)
    children[1].end()
    began = time.monotonic()
    for step in (2, 3, 4):
        snapshots.begin(step, ASSIGNMENT, random_shard(step))
        snapshots.await_whole(interrupt_never)
        assert not snapshots.are_whole
        snapshots.note_vote(0, 1)
    assert time.monotonic() - began < 15.0, "only the first step waits"
    assert_has(local_server, 1, "here")
    snapshots.end_generation()


def test_vote_waits_for_a_replacement_server(children: list[Child]) -> None:
    local_server, remote_server = (child.snapshot_server for child in children)
    snapshots = snapshots_at(local_server, remote_server)
    children[1].end()
    snapshots.begin(1, ASSIGNMENT, random_shard(1))
    order = StartSnapshots(3, ("w0",), ((local_server,),))
    threading.Timer(0.3, snapshots.start_snapshots, (order,)).start()
    snapshots.await_whole(interrupt_never)
    assert snapshots.are_whole
    assert_has(local_server, 1, "here")
    snapshots.end_generation()


@pytest.mark.parametrize("every", [1, 2])
def test_failed_snapshot_is_not_taken_again_from_later_tensors(
    children: list[Child], every: int
) -> None:
    """A vote has stopped waiting, the next step has changed the tensors in place, and only then the
    copy fails and the controller names other servers."""
    local_server, remote_server = (child.snapshot_server for child in children)
    pid = children[1].process.pid
    assert pid
    os.kill(pid, signal.SIGSTOP)
    snapshots = Snapshots("w0", "here", SPECS, every=every, secret=SECRET, patience_s=0.5)
    servers = ((local_server, remote_server),)
    snapshots.start_snapshots(StartSnapshots(3, ("w0",), servers))
    tensors = random_shard(2)
    snapshots.begin(2, ASSIGNMENT, tensors)
    snapshots.await_whole(interrupt_never)
    snapshots.await_copied()
    for name, tensor in random_shard(3).items():
        tensors[name].copy_(tensor)
    snapshots.begin(3, ASSIGNMENT, tensors)
    children[1].end()
    snapshots.start_snapshots(StartSnapshots(3, ("w0",), ((local_server,),)))
    deadline = time.monotonic() + 2.0
    while time.monotonic() < deadline:  # the copy fails meanwhile
        snapshots.await_whole(interrupt_never)
    assert_has(local_server, 2, "here")
    assert not snapshots.are_whole
    snapshots.begin(4, ASSIGNMENT, random_shard(4))
    while not snapshots.are_whole:
        snapshots.await_whole(interrupt_never)
    assert_has(local_server, 4, "here")
    snapshots.end_generation()


def test_frozen_server_blocks_neither_abort_nor_next_apply(children: list[Child]) -> None:
    """Nor does it block the end of a generation."""
    pid = children[0].process.pid
    assert pid
    os.kill(pid, signal.SIGSTOP)
    snapshots = snapshots_at(children[0].snapshot_server, children[1].snapshot_server)
    snapshots.begin(1, ASSIGNMENT, random_shard(1))

    def abort() -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        snapshots.await_whole(abort)
    began = time.monotonic()
    snapshots.await_copied()
    snapshots.end_generation()
    assert time.monotonic() - began < 1.0


def test_newer_of_two_writers_to_a_buffer_wins() -> None:
    """The older sender stalls half-way, as on a suspended machine."""
    server = SnapshotServerProcess("there", "", HOST, SECRET)
    snapshot_server = server.snapshot_server
    stuck = connect_remote((snapshot_server.host, snapshot_server.port), SECRET, 30.0)
    header = {"worker": "w0", "generation": 3, "kept_step": -2}
    body = b"x" * 1_000_000
    send_message(stuck, do="put", **header, step=5, num_bytes=len(body))
    stuck.sendall(body[:1000])
    with connect_remote((snapshot_server.host, snapshot_server.port), SECRET, 30.0) as newer:
        send_message(newer, do="put", **header, step=6, num_bytes=len(body))
        newer.sendall(body)
        send_message(newer, step=6)
        newer.recv(1)
    with pytest.raises(OSError):
        for _ in range(100):
            stuck.sendall(body)
    assert [slot.step for slot in server.report(3).slots] == [6]
    stuck.close()


def test_servers_forget_earlier_generations_but_the_one_to_keep() -> None:
    server = SnapshotServerProcess("there", "", HOST, SECRET)
    address = (server.snapshot_server.host, server.snapshot_server.port)
    for generation in (3, 4, 5, 6):
        with connect_remote(address, SECRET, 30.0) as sender:
            header = {"worker": "w0", "generation": generation, "kept_step": -2}
            send_message(sender, do="put", **header, step=7, num_bytes=100)
            sender.sendall(b"x" * 100)
            send_message(sender, step=7)
            assert receive_message(sender) == {"is_whole": True}
    full_bytes = server.report(6).memory_bytes
    server.forget(6, 4)
    assert [slot.generation for slot in server.report(6).slots] == [4, 6]
    assert server.report(6).memory_bytes == full_bytes / 2
    server.forget(6)
    assert [slot.generation for slot in server.report(6).slots] == [6]


def test_snapshot_overwritten_while_sent_is_discarded() -> None:
    server = SnapshotServerProcess("there", "", HOST, SECRET)
    with connect_remote(
        (server.snapshot_server.host, server.snapshot_server.port), SECRET, 30.0
    ) as sender:
        header = {"worker": "w0", "generation": 3, "kept_step": -2}
        send_message(sender, do="put", **header, step=5, num_bytes=100)
        sender.sendall(b"x" * 100)
        sender.shutdown(socket.SHUT_WR)
        assert sender.recv(1) == b""
    assert not server.report(3).slots
    server.forget(4)
    assert server.report(4).memory_bytes == 0
