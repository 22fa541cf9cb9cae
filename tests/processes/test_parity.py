"""Parity at real snapshot servers: folding chunks, rebuilding a lost part, discarded steps."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from test_snapshot_server import HOST, SECRET, Child, interrupt_never

from actors.runtime.handshake import connect_remote
from actors.snapshots.memory_layout import read_snapshot, sizes_of
from actors.snapshots.messages import receive_message, send_message
from actors.snapshots.server import SnapshotServerProcess
from actors.snapshots.worker_snapshots import Snapshots
from elastic.duties.recovery import bring_back
from elastic.geometry.assignment import Assignment
from elastic.geometry.layout import Layout
from elastic.geometry.tensor_specs import TensorSpec
from elastic.protocol.commands import StartSnapshots
from elastic.protocol.snapshot_events import SnapshotServerReported
from elastic.reshard.parity import chunk_size
from elastic.reshard.reshard_plan import CarriedPart
from elastic.reshard.snapshot_placement import SnapshotServer

NUM_NODES = 4
SPECS = (
    TensorSpec("large", (6_000_001,), fsdp_dim=0),
    TensorSpec("uneven", (5, 3), dtype="float64", fsdp_dim=0),
    TensorSpec("scalar", (), dtype="int64"),
    TensorSpec("running", (5,), kind="buffer"),
)
"""Parts of 6 MB, more than any socket's buffers hold, of different sizes."""
MEMBERS = tuple(f"w{rank}" for rank in range(NUM_NODES))
ASSIGNMENT = Assignment(3, Layout(fsdp=NUM_NODES), MEMBERS)


@pytest.fixture
def children() -> Iterator[list[Child]]:
    started = [Child(f"n{number}") for number in range(NUM_NODES)]
    yield started
    for child in started:
        child.end()


def random_shard(member: int, step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + member)
    size = [1_500_001, 1_500_001, 1_500_001, 1_499_998][member]
    rows = [2, 2, 1, 0][member]
    return {
        "large": torch.rand(size, generator=generator),
        "uneven": torch.rand(rows, 3, dtype=torch.float64, generator=generator),
        "scalar": torch.tensor(step),
        "running": torch.rand(5, generator=generator),
    }


def order_for(snapshot_servers: list[SnapshotServer], num_changes: int = 1) -> StartSnapshots:
    return StartSnapshots(
        3, MEMBERS, tuple((s,) for s in snapshot_servers), (MEMBERS,), num_changes
    )


def snapshots_at(order: StartSnapshots) -> list[Snapshots]:
    """The snapshots of one worker on each node."""
    all_snapshots = []
    for number, worker in enumerate(MEMBERS):
        all_snapshots.append(Snapshots(worker, f"n{number}", SPECS, every=1, secret=SECRET))
        all_snapshots[-1].start_snapshots(order)
    return all_snapshots


def take_on_all(snapshots: list[Snapshots], step: int) -> None:
    """Take a snapshot on all workers, and vote."""
    for number, worker_snapshots in enumerate(snapshots):
        worker_snapshots.begin(step, ASSIGNMENT, random_shard(number, step))
    for worker_snapshots in snapshots:
        worker_snapshots.await_whole(interrupt_never)
    num_whole = sum(worker_snapshots.are_whole for worker_snapshots in snapshots)
    for worker_snapshots in snapshots:
        worker_snapshots.note_vote(num_whole, NUM_NODES)


def query(children: list[Child]) -> dict[str, SnapshotServerReported]:
    """The reports of the live snapshot servers, by node."""
    reports = {}
    for child in children:
        if child.process.is_alive():
            child.pipe.send((True, 3))
            answer = child.pipe.recv()
            reports[answer.node] = answer
    return reports


def rebuild(children: list[Child], lost: int, step: int) -> dict[str, torch.Tensor]:
    answers = query(children)
    recoverable = bring_back(
        {node: answer.slots for node, answer in answers.items()},
        {node: answer.parities for node, answer in answers.items()},
    )
    [sources] = [o for s, o in recoverable.items() if (s.worker, s.step) == (MEMBERS[lost], step)]
    snapshot_servers = {child.snapshot_server.node: child.snapshot_server for child in children}
    carried = CarriedPart(MEMBERS[lost], "w9", "", sources)
    return read_snapshot(carried, snapshot_servers, "n9", SPECS, ASSIGNMENT, step, SECRET)


@pytest.mark.parametrize("lost", range(NUM_NODES))
def test_lost_part_is_rebuilt_bit_for_bit(children: list[Child], lost: int) -> None:
    snapshots = snapshots_at(order_for([child.snapshot_server for child in children]))
    for step in (1, 2, 3):
        take_on_all(snapshots, step)
        assert all(worker_snapshots.are_whole for worker_snapshots in snapshots)
    sizes = sizes_of(SPECS, ASSIGNMENT, MEMBERS)
    answers = query(children)
    assert sum(answer.received_bytes for answer in answers.values()) == 3 * sum(sizes)
    kept_bytes = sum(answer.memory_bytes for answer in answers.values())
    assert kept_bytes == 2 * (sum(sizes) + NUM_NODES * chunk_size(sizes))
    assert chunk_size(sizes) <= max(sizes) / (NUM_NODES - 1) + 64
    children[lost].end()
    for step in (2, 3):
        tensors = rebuild(children, lost, step)
        for name, tensor in random_shard(lost, step).items():
            assert torch.equal(tensors[name], tensor), name
    for worker_snapshots in snapshots:
        worker_snapshots.end_generation()


def test_step_without_all_chunks_is_incomplete_and_the_older_is_kept(
    children: list[Child],
) -> None:
    """One worker takes no snapshot of step 2, so the others' parities lack its chunks."""
    snapshots = snapshots_at(order_for([child.snapshot_server for child in children]))
    take_on_all(snapshots, 1)
    take_on_all(snapshots[:3], 2)
    take_on_all(snapshots[:3], 3)
    for answer in query(children).values():
        assert 1 in {slot.step for slot in answer.parities}
        if answer.node != "n3":
            assert {slot.step for slot in answer.parities} == {1}
    children[1].end()
    assert torch.equal(rebuild(children, 1, 1)["large"], random_shard(1, 1)["large"])
    for worker_snapshots in snapshots:
        worker_snapshots.end_generation()


def test_replaced_server_gets_all_chunks_under_the_next_order(children: list[Child]) -> None:
    snapshot_servers = [child.snapshot_server for child in children]
    snapshots = snapshots_at(order_for(snapshot_servers))
    take_on_all(snapshots, 1)
    children[2].end()
    children[2] = Child("n2")
    snapshot_servers[2] = children[2].snapshot_server
    order = order_for(snapshot_servers, num_changes=2)
    for rank, worker_snapshots in enumerate(snapshots):
        worker_snapshots.begin(2, ASSIGNMENT, random_shard(rank, 2))
    threading.Timer(
        0.3, lambda: [worker_snapshots.start_snapshots(order) for worker_snapshots in snapshots]
    ).start()
    for worker_snapshots in snapshots:
        worker_snapshots.await_whole(interrupt_never)
    assert all(worker_snapshots.are_whole for worker_snapshots in snapshots)
    children[0].end()
    for name, tensor in random_shard(0, 2).items():
        assert torch.equal(rebuild(children, 0, 2)[name], tensor), name
    for worker_snapshots in snapshots:
        worker_snapshots.end_generation()


def test_parities_of_old_sets_are_freed_once_a_newer_step_is_complete(
    children: list[Child],
) -> None:
    snapshot_servers = [child.snapshot_server for child in children]
    snapshots = snapshots_at(order_for(snapshot_servers))
    take_on_all(snapshots, 1)
    smaller = StartSnapshots(3, MEMBERS, tuple((k,) for k in snapshot_servers), (MEMBERS[:3],), 2)
    for worker_snapshots in snapshots:
        worker_snapshots.start_snapshots(smaller)
    for step in (2, 3):
        take_on_all(snapshots, step)
        assert all(worker_snapshots.are_whole for worker_snapshots in snapshots)
        sets = {p.members for answer in query(children).values() for p in answer.parities}
        assert sets == ({MEMBERS, MEMBERS[:3]} if step == 2 else {MEMBERS[:3]})
    for worker_snapshots in snapshots:
        worker_snapshots.end_generation()


class Chunk:
    """A connection of another server; the test controls when it sends its chunk."""

    def __init__(self, server: SnapshotServerProcess, worker: str, step: int, body: bytes) -> None:
        self.step, self.body = step, body
        self.socket = connect_remote(
            (server.snapshot_server.host, server.snapshot_server.port), SECRET, 30.0
        )
        header = {"generation": 3, "kept_step": -2, "members": ["w0", "w1", "w2"], "at": "w0"}
        sizes = {"parity_bytes": len(body), "num_bytes": len(body)}
        send_message(self.socket, do="fold", worker=worker, step=step, **header, **sizes)
        self.answer = receive_message(self.socket)

    def send(self, num_bytes: int | None = None) -> None:
        self.socket.sendall(self.body[:num_bytes])

    def finish(self) -> bool:
        send_message(self.socket, step=self.step)
        return bool((receive_message(self.socket) or {}).get("is_whole"))


ONES, TWOS = bytes([1]) * 5_000_000, bytes([2]) * 5_000_000


def parities_of(server: SnapshotServerProcess) -> list[int]:
    return [parity.step for parity in server.report(3).parities]


def test_interrupted_chunk_invalidates_only_its_step() -> None:
    server = SnapshotServerProcess("n0", "", HOST, SECRET)
    torn, other = Chunk(server, "w1", 5, ONES), Chunk(server, "w2", 5, TWOS)
    torn.send(4_500_000)
    torn.socket.close()
    other.send()
    assert other.finish()
    assert Chunk(server, "w1", 5, ONES).answer is None, "a second copy would be folded in twice"
    assert parities_of(server) == []
    for worker, body in (("w1", ONES), ("w2", TWOS)):
        chunk = Chunk(server, worker, 6, body)
        chunk.send()
        assert chunk.finish()
    assert parities_of(server) == [6]


def test_repeated_chunk_is_folded_once() -> None:
    server = SnapshotServerProcess("n0", "", HOST, SECRET)
    for worker, body in (("w1", ONES), ("w2", TWOS)):
        chunk = Chunk(server, worker, 5, body)
        chunk.send()
        assert chunk.finish()
        assert Chunk(server, worker, 5, body).answer == {"is_wanted": False}
    with connect_remote(
        (server.snapshot_server.host, server.snapshot_server.port), SECRET, 30.0
    ) as reader:
        header = {"generation": 3, "step": 5, "members": ["w0", "w1", "w2"], "at": "w0"}
        send_message(reader, do="get", **header, begin=10, end=1010)
        assert receive_message(reader) == {"num_bytes": 1000}
        assert np.all(np.frombuffer(reader.recv(1000, socket.MSG_WAITALL), np.uint8) == 3)


def test_slow_chunk_of_an_older_step_is_refused() -> None:
    server = SnapshotServerProcess("n0", "", HOST, SECRET)
    slow = Chunk(server, "w1", 5, ONES)
    slow.send(1000)
    newer = [Chunk(server, "w1", 6, ONES), Chunk(server, "w2", 6, TWOS)]
    for chunk in newer:
        chunk.send()
        assert chunk.finish()
    with pytest.raises(OSError):
        for _ in range(100):
            slow.send()
    assert parities_of(server) == [6]
