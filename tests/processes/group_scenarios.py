"""What the processes of `test_group_backends.py` do: generations that end in many ways."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from fake_nccl import FakeNccl
from torch import Tensor
from torch.distributed import ProcessGroup, TCPStore

from actors.distributed.backends.backend import GroupBackend, backend_of
from actors.distributed.backends.nccl import GroupsAborted, NcclBackend
from actors.distributed.groups import Formation
from actors.distributed.stall import wait_for
from elastic.geometry.assignment import Assignment
from elastic.geometry.layout import Layout
from elastic.protocol.commands import Form
from elastic.reshard.reshard_plan import ReshardPlan

HOST = "127.0.0.1"
CPU = torch.device("cpu")
TIMEOUT_S = 60.0
"""Longer than an aborted call may take, by far."""
ABORT_AFTER_S = 0.3
REPEAT_ABORT_S = 0.02
LAYOUTS = {1: Layout(), 2: Layout(dp=2), 3: Layout(fsdp=3), 4: Layout(dp=2, tp=2)}
WORKERS = ("w0", "w1", "w2", "w3")


@dataclass
class Rank:
    """One process: it forms generations, and reports what it measured."""

    worker: str
    port: int
    folder: Path
    backend: GroupBackend
    fake: FakeNccl | None
    measured: dict[str, float] = field(default_factory=dict)

    def formation(
        self, generation: int, members: tuple[str, ...], holders: tuple[str, ...] = ()
    ) -> Formation:
        assignment = Assignment(generation, LAYOUTS[len(members)], members)
        everyone = tuple(dict.fromkeys((*members, *holders)))
        old = Assignment(generation - 1, LAYOUTS[len(everyone)], everyone) if holders else None
        plan = ReshardPlan(0, 0, old, assignment, holders)
        order = Form(generation, assignment, plan, HOST, self.port)
        return Formation(self.worker, order, CPU, TIMEOUT_S, backend=self.backend)

    def train(
        self, generation: int, members: tuple[str, ...], holders: tuple[str, ...] = ()
    ) -> None:
        """Form a generation, reduce in each of its groups, and leave it."""
        formation = self.formation(generation, members, holders)
        formation.form()
        reduce_everywhere(formation)
        self.meet(f"generation {generation} has reduced", len({*members, *holders}))
        formation.abort()
        formation.dissolve()

    def expect_abort(self, formation: Formation, call: Callable[[], object]) -> None:
        """A call that blocks raises soon after an abort, which is repeated until then, as a worker
        does it: connections that did not exist yet survive the first one."""
        ended = threading.Event()

        def abort() -> None:
            time.sleep(ABORT_AFTER_S)
            while not ended.is_set():
                formation.abort()
                ended.wait(REPEAT_ABORT_S)

        thread = threading.Thread(target=abort)
        thread.start()
        began = time.monotonic()
        try:
            call()
        except RuntimeError:
            self.measured["blocked_s"] = time.monotonic() - began
        ended.set()
        thread.join()
        formation.abort()
        formation.dissolve()

    def meet(self, name: str, num_ranks: int) -> None:
        """Wait for the other processes, beside all groups."""
        store = TCPStore(HOST, self.port, is_master=False, wait_for_workers=False)
        if store.add(f"meeting {name}", 1) == num_ranks:
            store.set(f"met {name}", "")
        store.wait([f"met {name}"])


def reduce_everywhere(formation: Formation) -> None:
    """Sum ones in the world, along each axis and in the transfer group, if the rank is in it."""
    groups = [formation.transfer]
    if formation.groups is not None:
        mesh = formation.groups.mesh
        groups += [formation.groups.world, *mesh.get_all_groups()]
    for group in groups:
        assert group is not None
        ones = torch.ones(1)
        wait_for(group.allreduce([ones]))
        assert ones.item() == group.size()


def changes(rank: Rank) -> None:
    """Shrink at the end, grow by a late joiner, shrink in the middle, to one, grow to all, and move
    state from a worker that is no member any more."""
    late = 1.0 if rank.worker == "w3" else 0.0
    plans = [WORKERS, WORKERS[:3], WORKERS, ("w0", "w2", "w3"), ("w2",), WORKERS]
    for generation, members in enumerate(plans, 1):
        if rank.worker in members:
            time.sleep(late if generation == 3 else 0.0)
            rank.train(generation, members)
    rank.train(len(plans) + 1, ("w0", "w2"), WORKERS)


def death_before_forming(rank: Rank) -> None:
    rank.train(1, WORKERS)
    die_while_others_form(rank, lambda: os.kill(os.getpid(), signal.SIGKILL))


def death_in_forming(rank: Rank) -> None:
    """w2 dies when it connects its first group, that of the world."""
    rank.train(1, WORKERS)
    die_while_others_form(rank, lambda: die_in_group(rank, 1))


def death_between_groups(rank: Rank) -> None:
    """w2 dies when it connects its second group; the others wait in that one or in a later one."""
    rank.train(1, WORKERS)
    die_while_others_form(rank, lambda: die_in_group(rank, 2))


def die_in_group(rank: Rank, number: int) -> None:
    num_groups = 0

    def die_in_time() -> None:
        nonlocal num_groups
        num_groups += 1
        if num_groups == number:
            os.kill(os.getpid(), signal.SIGKILL)

    class Dying(dist.ProcessGroupGloo):
        def __init__(self, *arguments: Any) -> None:
            die_in_time()
            super().__init__(*arguments)

    if rank.fake is None:
        dist.ProcessGroupGloo = Dying  # type: ignore[misc]
    else:
        rank.fake.before_connecting = lambda end: die_in_time()
    rank.formation(2, WORKERS).form()


def die_while_others_form(rank: Rank, die: Callable[[], object]) -> None:
    if rank.worker == "w2":
        die()
        raise AssertionError("this process should be dead")
    formation = rank.formation(2, WORKERS)
    rank.expect_abort(formation, formation.form)
    rank.train(3, ("w0", "w1", "w3"))


def collectives(world: ProcessGroup) -> dict[str, Callable[[], object]]:
    """Calls that block, since not all ranks make them."""
    ones, all_ones = torch.ones(4), torch.ones(4 * world.size())
    peer = (world.rank() + 1) % world.size()
    tensors: list[Tensor] = [torch.ones(4) for _ in range(world.size())]
    return {
        "all_reduce": lambda: dist.all_reduce(ones),
        "all_gather": lambda: dist.all_gather_into_tensor(all_ones, ones),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(ones, all_ones),
        "all_to_all": lambda: dist.all_to_all_single(torch.empty(4 * world.size()), all_ones),
        "broadcast": lambda: dist.broadcast(ones, 1),
        "gather": lambda: dist.all_gather(tensors, ones),
        "barrier": lambda: wait_for(world.barrier()),
        "receive": lambda: dist.recv(ones, peer),
    }


def abort_during_collectives(rank: Rank) -> None:
    """In each generation w0 is alone in another collective; then all form again."""
    names = sorted(collectives(FakeWorld()))
    slowest = 0.0
    for generation, name in enumerate(names, 1):
        formation = rank.formation(generation, WORKERS[:2])
        formation.form()
        reduce_everywhere(formation)
        assert formation.groups is not None
        if rank.worker == "w0":
            rank.expect_abort(formation, collectives(formation.groups.world)[name])
            slowest = max(slowest, rank.measured.pop("blocked_s"))
        rank.meet(name, 2)
        if rank.worker == "w1":
            formation.abort()
            formation.dissolve()
    rank.train(len(names) + 1, WORKERS[:2])
    if rank.worker == "w0":
        rank.measured["blocked_s"] = slowest


class FakeWorld:
    """Two ranks, for the names of the collectives."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 2


def left_behind(rank: Rank) -> None:
    """A thread of w0 hangs in a connection that no abort ends. Another forms the next generation;
    the thread's own connection succeeds after all, and changes nothing any more."""
    if rank.worker == "w1":
        rank.train(2, WORKERS[:2])
        return
    assert rank.fake is not None
    hangs, raised = threading.Event(), []
    rank.fake.after_connecting = hangs.wait
    old = rank.formation(1, WORKERS[:1])

    def form_old() -> None:
        try:
            old.form()
        except RuntimeError as error:
            raised.append(error)

    thread = threading.Thread(target=form_old)
    thread.start()
    time.sleep(ABORT_AFTER_S)
    assert old.can_lose_wake_ups
    old.abort()
    old.dissolve()
    rank.fake.after_connecting = lambda: None
    formation = rank.formation(2, WORKERS[:2])
    formation.form()
    hangs.set()
    thread.join()
    assert [type(error) for error in raised] == [GroupsAborted]
    reduce_everywhere(formation)
    rank.meet("generation 2 has reduced", 2)
    formation.abort()
    formation.dissolve()


def cycles(rank: Rank) -> None:
    """Form and abort again and again; descriptors and threads stay as many."""
    process, counts = psutil.Process(), []
    for generation in range(1, 51):
        rank.train(generation, WORKERS[:2])
        counts.append((process.num_fds(), process.num_threads()))
    rank.measured["new_fds"] = counts[-1][0] - counts[5][0]
    rank.measured["new_threads"] = counts[-1][1] - counts[5][1]


def run_rank(number: int, port: int, folder: Path, backend: str, scenario: str) -> None:
    """Run one process, and write what it measured."""
    torch.set_num_threads(1)
    fake = FakeNccl(port) if backend == "nccl" else None
    chosen = NcclBackend(fake, "fake_nccl", "cpu") if fake else backend_of("cpu")
    rank = Rank(WORKERS[number], port, folder, chosen, fake)
    globals()[scenario](rank)
    (folder / rank.worker).write_text(json.dumps(rank.measured))
