"""Keepers and the way to them: real sockets, real memory, and what happens when one is gone."""

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

from actors.runtime.handshake import connect_afar, new_secret
from actors.snapshots.memory_layout import read_snapshot
from actors.snapshots.messages import send_message
from actors.snapshots.server import SnapshotHost, host_snapshot_server
from actors.snapshots.worker_snapshots import Snapshots
from elastic.geometry.assignment import Assignment
from elastic.geometry.layout import Layout
from elastic.geometry.tensor_specs import TensorSpec
from elastic.protocol.commands import StartSnapshots
from elastic.protocol.events import SnapshotServerReady
from elastic.reshard.reshard_plan import Carried
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
    """A keeper in a process of its own."""

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


def part(step: int) -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(step)
    return {
        "large": torch.rand(5_000_000, generator=made),
        "odd": torch.rand(7, 3, dtype=torch.float64, generator=made),
        "scalar": torch.tensor(step),
        "running": torch.rand(5, generator=made),
    }


def snapshots_at(*snapshot_servers: SnapshotServer, node: str = "here") -> Snapshots:
    snapshots = Snapshots("w0", node, SPECS, every=1, secret=SECRET)
    snapshots.protect(StartSnapshots(3, ("w0",), (snapshot_servers,)))
    return snapshots


def never() -> None:
    pass


def assert_has(snapshot_server: SnapshotServer, step: int, node: str) -> None:
    """Whether it is read in place or over the network is by the reader's node."""
    carried, snapshot_servers = (
        Carried("w0", "w1", snapshot_server.node),
        {snapshot_server.node: snapshot_server},
    )
    found = read_snapshot(carried, snapshot_servers, node, SPECS, ASSIGNMENT, step, SECRET)
    for name, tensor in part(step).items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("reader", ["here", "there", "elsewhere"])
def test_a_large_part_comes_to_both_nodes_and_back(children: list[Child], reader: str) -> None:
    here, there = (child.snapshot_server for child in children)
    snapshots = snapshots_at(here, there)
    for step in (1, 2, 3):
        snapshots.take(step, ASSIGNMENT, part(step))
        snapshots.await_whole(never)
        assert snapshots.are_whole
        snapshots.note_vote(1, 1)
    for snapshot_server in (here, there):
        assert_has(snapshot_server, 3, reader)
        assert_has(snapshot_server, 2, reader)
    snapshots.end_generation()


def test_without_a_keeper_beside_it_goes_straight_to_the_other(children: list[Child]) -> None:
    snapshots = snapshots_at(children[1].snapshot_server)
    snapshots.take(1, ASSIGNMENT, part(1))
    snapshots.await_whole(never)
    assert snapshots.are_whole
    assert_has(children[1].snapshot_server, 1, "there")
    snapshots.end_generation()


def test_what_is_whole_everywhere_is_kept_while_others_fail(children: list[Child]) -> None:
    here, there = (child.snapshot_server for child in children)
    snapshots = snapshots_at(here, there)
    snapshots.take(1, ASSIGNMENT, part(1))
    snapshots.await_whole(never)
    snapshots.note_vote(1, 1)
    children[1].end()
    began = time.monotonic()
    for step in (2, 3, 4):
        snapshots.take(step, ASSIGNMENT, part(step))
        snapshots.await_whole(never)
        assert not snapshots.are_whole
        snapshots.note_vote(0, 1)
    assert time.monotonic() - began < 15.0, "it is patient once, not every step"
    assert_has(here, 1, "here")
    snapshots.end_generation()


def test_another_keeper_is_named_while_the_vote_waits(children: list[Child]) -> None:
    here, there = (child.snapshot_server for child in children)
    snapshots = snapshots_at(here, there)
    children[1].end()
    snapshots.take(1, ASSIGNMENT, part(1))
    order = StartSnapshots(3, ("w0",), ((here,),))
    threading.Timer(0.3, snapshots.protect, (order,)).start()
    snapshots.await_whole(never)
    assert snapshots.are_whole
    assert_has(here, 1, "here")
    snapshots.end_generation()


def test_a_frozen_keeper_holds_nobody_up(children: list[Child]) -> None:
    """Neither an abort, nor the end of a generation, nor the next apply."""
    pid = children[0].process.pid
    assert pid
    os.kill(pid, signal.SIGSTOP)
    snapshots = snapshots_at(children[0].snapshot_server, children[1].snapshot_server)
    snapshots.take(1, ASSIGNMENT, part(1))

    def abort() -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        snapshots.await_whole(abort)
    began = time.monotonic()
    snapshots.await_copied()
    snapshots.end_generation()
    assert time.monotonic() - began < 1.0


def test_of_two_that_write_the_same_room_the_newer_counts() -> None:
    """The older sender stands still half-way, as on a machine that was stopped."""
    server = SnapshotHost("there", "", HOST, SECRET)
    snapshot_server = server.snapshot_server
    stuck = connect_afar((snapshot_server.host, snapshot_server.port), SECRET, 30.0)
    about = {"worker": "w0", "generation": 3, "kept_step": -2}
    body = b"x" * 1_000_000
    send_message(stuck, do="put", **about, step=5, num_bytes=len(body))
    stuck.sendall(body[:1000])
    with connect_afar((snapshot_server.host, snapshot_server.port), SECRET, 30.0) as newer:
        send_message(newer, do="put", **about, step=6, num_bytes=len(body))
        newer.sendall(body)
        send_message(newer, step=6)
        newer.recv(1)
    with pytest.raises(OSError):
        for _ in range(100):
            stuck.sendall(body)
    assert [slot.step for slot in server.told(3).slots] == [6]
    stuck.close()


def test_what_was_written_over_while_it_was_sent_does_not_count() -> None:
    server = SnapshotHost("there", "", HOST, SECRET)
    with connect_afar(
        (server.snapshot_server.host, server.snapshot_server.port), SECRET, 30.0
    ) as sender:
        about = {"worker": "w0", "generation": 3, "kept_step": -2}
        send_message(sender, do="put", **about, step=5, num_bytes=100)
        sender.sendall(b"x" * 100)
        sender.shutdown(socket.SHUT_WR)
        assert sender.recv(1) == b""
    assert not server.told(3).slots
    server.forget(4)
    assert server.told(4).memory_bytes == 0
