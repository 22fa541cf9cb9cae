"""Copies that take longer than a step and the wait of a vote: the interval grows until they fit."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace

import pytest
import torch
from test_snapshot_server import HOST, SECRET, Child, interrupt_never
from users_policy import users_policy

from actors.snapshots.memory_layout import read_snapshot
from actors.snapshots.worker_snapshots import Snapshots
from elastic.controller.core import Core
from elastic.geometry.assignment import Assignment
from elastic.geometry.target_layout import TargetLayout
from elastic.geometry.tensor_specs import TensorSpec
from elastic.geometry.training_job import Job
from elastic.protocol.commands import Command, StartSnapshots
from elastic.protocol.events import (
    Event,
    GroupFormed,
    RunOpened,
    StateReady,
    StepCommitted,
    StoreReady,
    WorkerReady,
)
from elastic.protocol.notes import Warned
from elastic.protocol.snapshot_events import SnapshotServerReady
from elastic.protocol.votes import Ballot, StepRecord, Vote, pack_vote, unpack_vote
from elastic.reshard.reshard_plan import CarriedPart
from elastic.reshard.snapshot_placement import SnapshotServer

PART_ELEMENTS = 500_000
SPECS = (
    TensorSpec("large", (2 * PART_ELEMENTS,), fsdp_dim=0),
    TensorSpec("running", (5,), kind="buffer"),
)
PART_BYTES = 4 * PART_ELEMENTS
STEP_S = 0.05
VOTE_PATIENCE_S = 0.02
NODES = ("a", "b")
CHUNK_BYTES = 2**16


class SlowLink:
    """Forwards connections to a server, at a limited speed."""

    def __init__(self, server: SnapshotServer, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._address = (server.host, server.port)
        self._listener = socket.create_server((HOST, 0))
        self.server = replace(server, port=self._listener.getsockname()[1])
        self._sockets: list[socket.socket] = [self._listener]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        for sock in self._sockets:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(self._address)
                self._sockets += [near, far]
                for ends in ((near, far), (far, near)):
                    threading.Thread(target=self._forward, args=ends, daemon=True).start()

    def _forward(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while received := source.recv(CHUNK_BYTES):
                time.sleep(len(received) / self._bytes_per_s)
                target.sendall(received)
        with suppress(OSError):
            target.shutdown(socket.SHUT_WR)


@dataclass
class Pair:
    """Two workers on two nodes, the controller's core, and the steps that they take together."""

    servers: dict[str, SnapshotServer]
    links: dict[str, SnapshotServer]
    """By node, its server as the other node sees it."""
    setting: int
    core: Core = field(default_factory=Core)
    step: int = 1
    orders: list[StartSnapshots] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    late_orders: list[StartSnapshots] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._reports: list[Event] = []
        policy = users_policy(2, 2, checkpoint_auto=False, snapshot_every=self.setting)
        job, layout = Job(8, steps=10_000), TargetLayout.parse("fsdp=2", 2)
        self._deliver(RunOpened(1, policy, layout, job), StoreReady(HOST, 1))
        self._deliver(*(WorkerReady(f"w{n}", node, 1) for n, node in enumerate(NODES)))
        workers = ("w0", "w1")
        self._deliver(*(GroupFormed(worker, 1) for worker in workers))
        self._deliver(*(StateReady(worker, 1, 0, 0, 0.0, 1, 1, 1) for worker in workers))
        assert self.core.state.live.held
        self.assignment: Assignment = self.core.state.live.held.assignment
        self.tensors = [part_of(rank, 1) for rank in range(2)]
        self.workers = [
            Snapshots(
                worker,
                node,
                SPECS,
                self.setting,
                secret=SECRET,
                report=self._reports.append,
                patience_s=VOTE_PATIENCE_S,
            )
            for worker, node in zip(workers, NODES, strict=True)
        ]
        self._commit(Vote(1, 1.0, 8, 1.0, 2))
        self._deliver(*(SnapshotServerReady(server) for server in self.servers.values()))

    def train(self) -> Vote:
        """One step; returns its vote. The second worker gets orders one step later."""
        for rank, snapshots in enumerate(self.workers):
            snapshots.begin(self.step, self.assignment, self.tensors[rank])
        time.sleep(STEP_S)
        self.step += 1
        for snapshots in self.workers:
            snapshots.await_whole(interrupt_never)
        ballots = [
            pack_vote(Ballot(self.step, rank, (1.0, 4.0, 1.0), snapshot_order=s.whole_order))
            for rank, s in enumerate(self.workers)
        ]
        vote = unpack_vote([sum(n) for n in zip(*ballots, strict=True)], self.step, 2).vote
        for rank, snapshots in enumerate(self.workers):
            snapshots.note_vote(vote.num_snapshots, 2)
            snapshots.await_copied()
            for name, tensor in part_of(rank, self.step).items():
                self.tensors[rank][name].copy_(tensor)
        for order in self.late_orders:
            self.workers[1].start_snapshots(self._as_seen_by(1, order))
        self.late_orders = []
        self._commit(vote)
        reports, self._reports[:] = tuple(self._reports), []
        self._deliver(*reports)
        return vote

    def _commit(self, vote: Vote) -> None:
        record = StepRecord(0.0, vote.step, 1, 2, 1.0, 8, 0.1, 1.0, STEP_S, skipped=False)
        self._deliver(StepCommitted(1, record, vote))

    def _deliver(self, *events: Event) -> None:
        commands = [command for event in events for command in self.core.step(0.0, event)]
        self._carry_out(commands)

    def _carry_out(self, commands: list[Command]) -> None:
        for command in commands:
            if isinstance(command, StartSnapshots):
                self.orders.append(command)
                self.late_orders.append(command)
                self.workers[0].start_snapshots(self._as_seen_by(0, command))
            if isinstance(command, Warned):
                self.warnings.append(command.text)

    def _as_seen_by(self, rank: int, order: StartSnapshots) -> StartSnapshots:
        """The servers as this worker reaches them: that of the other node by a slow link."""
        seen = tuple(
            tuple(s if s.node == NODES[rank] else self.links[s.node] for s in servers)
            for servers in order.snapshot_servers
        )
        return replace(order, snapshot_servers=seen)


def part_of(rank: int, step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return {
        "large": torch.rand(PART_ELEMENTS, generator=generator),
        "running": torch.rand(5, generator=torch.Generator().manual_seed(step)),
    }


@pytest.fixture
def children() -> Iterator[dict[str, Child]]:
    started = {node: Child(node) for node in NODES}
    yield started
    for child in started.values():
        child.end()


@pytest.fixture
def links(children: dict[str, Child]) -> Iterator[dict[str, SlowLink]]:
    """Copies to one node take 28 steps, those to the other 18: without agreement each worker would
    begin its next snapshot at another step."""
    shares = {"a": 28, "b": 18}
    opened = {
        node: SlowLink(child.snapshot_server, PART_BYTES / (shares[node] * STEP_S))
        for node, child in children.items()
    }
    yield opened
    for link in opened.values():
        link.close()


def common_steps(children: dict[str, Child]) -> set[int]:
    """The steps of which both servers have the complete snapshots of both workers."""
    steps = []
    for child in children.values():
        child.pipe.send((True, 1))
        slots = child.pipe.recv().slots
        steps += [{slot.step for slot in slots if slot.worker == worker} for worker in ("w0", "w1")]
    return set.intersection(*steps)


@pytest.mark.parametrize("setting", [pytest.param(1, marks=pytest.mark.soak), 3])
def test_slow_copies_are_taken_less_often_and_cover_one_step(
    children: dict[str, Child], links: dict[str, SlowLink], setting: int
) -> None:
    pair = Pair(
        {node: child.snapshot_server for node, child in children.items()},
        {node: link.server for node, link in links.items()},
        setting,
    )
    num_full = 0
    while num_full < 3:
        assert pair.step < 500, "no vote says that the snapshots of all workers are complete"
        if pair.train().num_snapshots < 2:
            continue
        num_full += 1
        step = max(common_steps(children))
        every = pair.orders[-1].every
        assert every > setting and every % setting == 0 and step % every == 0
        assert pair.step - step <= 2 * every
        for rank, far in ((0, "b"), (1, "a")):
            carried = CarriedPart(f"w{rank}", "w9", far)
            tensors = read_snapshot(
                carried, pair.servers, "n9", SPECS, pair.assignment, step, SECRET
            )
            for name, expected in part_of(rank, step).items():
                assert torch.equal(tensors[name], expected), name
    assert pair.warnings and all("snapshot.every says" in text for text in pair.warnings)
    for snapshots in pair.workers:
        snapshots.end_generation()
