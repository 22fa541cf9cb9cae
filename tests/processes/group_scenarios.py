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
from actors.distributed.backends.nccl import GroupsAborted, Nccl, NcclBackend
from actors.distributed.backends.waiting import launching
from actors.distributed.groups import Formation
from actors.distributed.stall import StallDetector, wait_for
from elastic.geometry.assignment import Assignment
from elastic.geometry.layout import Layout
from elastic.protocol.commands import Form
from elastic.reshard.reshard_plan import ReshardPlan

HOST = "127.0.0.1"
CPU = torch.device("cpu")
TIMEOUT_S = 60.0
"""Longer than an aborted call may take, by far."""
ABORT_AFTER_S = 0.3
DEATH = "w2 dies"
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
    device: torch.device = CPU
    measured: dict[str, float] = field(default_factory=dict)
    has_raised: bool = False
    """Whether the latest call that was expected to block has raised."""

    def formation(
        self, generation: int, members: tuple[str, ...], holders: tuple[str, ...] = ()
    ) -> Formation:
        assignment = Assignment(generation, LAYOUTS[len(members)], members)
        everyone = tuple(dict.fromkeys((*members, *holders)))
        old = Assignment(generation - 1, LAYOUTS[len(everyone)], everyone) if holders else None
        plan = ReshardPlan(0, 0, old, assignment, holders)
        order = Form(generation, assignment, plan, HOST, self.port)
        return Formation(self.worker, order, self.device, TIMEOUT_S, backend=self.backend)

    def train(
        self, generation: int, members: tuple[str, ...], holders: tuple[str, ...] = ()
    ) -> None:
        """Form a generation, reduce in each of its groups, and leave it."""
        formation = self.formation(generation, members, holders)
        formation.form()
        self.reduce_everywhere(formation)
        self.meet(f"generation {generation} has reduced", len({*members, *holders}))
        formation.abort()
        formation.dissolve()

    def expect_abort(
        self,
        formation: Formation,
        call: Callable[[], object],
        has_death: bool = True,
        is_left: bool = False,
    ) -> None:
        """A call that blocks ends soon after an abort, which is repeated until then, as a worker
        does it: connections that did not exist yet survive the first one. A thread that NCCL does
        not wake while it connects is left behind. With `has_death` the abort follows that
        of w2. On the CPU only a call with `is_left` may still block then."""
        thread = threading.Thread(target=self._call, args=(call,), daemon=True)
        thread.start()
        if has_death:
            self._store().wait([DEATH])
        began = time.monotonic()
        time.sleep(ABORT_AFTER_S)
        stall = StallDetector(thread)
        while thread.is_alive():
            formation.abort()
            may_last = self.backend.can_be_left and formation.can_lose_wake_ups
            if (may_last or stall.is_in_launch) and stall.lasts():
                break
            thread.join(REPEAT_ABORT_S)
        self.measured["blocked_s"] = time.monotonic() - began
        is_on_gpu = self.device.type == "cuda"  # NCCL may also return, with garbage
        assert self.has_raised or is_on_gpu or is_left
        assert thread.is_alive() or is_on_gpu or not is_left
        formation.abort()
        formation.dissolve()

    def _call(self, call: Callable[[], object]) -> None:
        self.has_raised = False
        try:
            call()
            self.synchronize()
        except RuntimeError:
            self.has_raised = True

    def meet(self, name: str, num_ranks: int) -> None:
        """Wait for the other processes, beside all groups."""
        store = self._store()
        if store.add(f"meeting {name}", 1) == num_ranks:
            store.set(f"met {name}", "")
        store.wait([f"met {name}"])

    def die(self) -> None:
        """Called by w2."""
        self._store().set(DEATH, "")
        os.kill(os.getpid(), signal.SIGKILL)

    def _store(self) -> TCPStore:
        return TCPStore(HOST, self.port, is_master=False, wait_for_workers=False)

    def reduce_everywhere(self, formation: Formation) -> None:
        """Sum ones in the world, along each axis and in the transfer group, if this is in it."""
        groups = [formation.transfer]
        if formation.groups is not None:
            mesh = formation.groups.mesh
            groups += [formation.groups.world, *mesh.get_all_groups()]
        for group in groups:
            assert group is not None
            ones = torch.ones(1, device=self.device)
            wait_for(group.allreduce([ones]))
            assert ones.item() == group.size()

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


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
    die_while_others_form(rank, rank.die)


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
            rank.die()

    class Dying(dist.ProcessGroupGloo):
        def __init__(self, *arguments: Any) -> None:
            die_in_time()
            super().__init__(*arguments)

    class DyingNccl(Nccl):
        def connect(self, *arguments: Any) -> Any:
            die_in_time()
            return super().connect(*arguments)

    if isinstance(rank.backend, NcclBackend) and rank.fake is None:
        rank.backend._engine = DyingNccl()
    elif rank.fake is None:
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


def death_in_collective(rank: Rank) -> None:
    """w2 dies before a collective along an axis; the vote of the others is queued behind it."""
    survive_death(rank, lambda formation: rank.reduce_everywhere(formation))


def death_before_collective(rank: Rank) -> None:
    """The same in the first collective of a generation."""
    survive_death(rank, lambda formation: None)


def survive_death(rank: Rank, before: Callable[[Formation], None]) -> None:
    formation = rank.formation(1, WORKERS[:3])
    formation.form()
    before(formation)
    rank.meet("the death", 3)
    if rank.worker == "w2":
        rank.die()
    time.sleep(0.0 if rank.worker == "w0" else 2 * ABORT_AFTER_S / 3)

    def step() -> None:
        assert formation.groups is not None
        gradients = torch.ones(2**20, device=rank.device)
        axis = formation.groups.mesh.get_group("fsdp")
        wait_for(axis.allreduce([gradients]))
        wait_for(formation.groups.world.allreduce([torch.ones(3, device=rank.device)]))

    rank.expect_abort(formation, step)
    began = time.monotonic()
    rank.train(2, WORKERS[:2])
    rank.measured["recovered_s"] = time.monotonic() - began


def death_in_launch(rank: Rank) -> None:
    """w2 dies before the others first exchange with it: an abort does not end the launch."""
    formation = rank.formation(1, WORKERS[:3])
    formation.form()
    rank.meet("the death", 3)
    if rank.worker == "w2":
        rank.die()

    def receive() -> None:
        if rank.device.type == "cuda":
            launching(dist.recv, torch.ones(4, device=rank.device), 2)
        else:
            launching(time.sleep, TIMEOUT_S)

    rank.expect_abort(formation, receive, is_left=True)
    began = time.monotonic()
    rank.train(2, WORKERS[:2])
    rank.measured["recovered_s"] = time.monotonic() - began


def collectives(world: ProcessGroup, device: torch.device) -> dict[str, Callable[[], object]]:
    """Calls that block, since not all ranks make them."""
    ones = torch.ones(4, device=device)
    all_ones = torch.ones(4 * world.size(), device=device)
    peer = (world.rank() + 1) % world.size()
    tensors: list[Tensor] = [torch.ones_like(ones) for _ in range(world.size())]
    return {
        "all_reduce": lambda: dist.all_reduce(ones),
        "all_gather": lambda: dist.all_gather_into_tensor(all_ones, ones),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(ones, all_ones),
        "all_to_all": lambda: dist.all_to_all_single(torch.empty_like(all_ones), all_ones),
        "broadcast": lambda: dist.broadcast(ones, 1),
        "gather": lambda: dist.all_gather(tensors, ones),
        "barrier": lambda: wait_for(world.barrier()),
        "receive": lambda: launching(dist.recv, ones, peer),
    }


def abort_during_collectives(rank: Rank) -> None:
    """In each generation w0 is alone in another collective; then all form again."""
    names = sorted(collectives(FakeWorld(), CPU))
    slowest = 0.0
    for generation, name in enumerate(names, 1):
        formation = rank.formation(generation, WORKERS[:2])
        formation.form()
        rank.reduce_everywhere(formation)
        assert formation.groups is not None
        if rank.worker == "w0":
            blocked = collectives(formation.groups.world, rank.device)[name]
            rank.expect_abort(formation, blocked, has_death=False)
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
    rank.reduce_everywhere(formation)
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
    """Run one process, and write what it measured. `backend` is "gloo", "nccl" with a library that
    behaves as NCCL does, or "cuda" with NCCL itself, on one GPU for all processes."""
    torch.set_num_threads(1)
    fake = FakeNccl(port) if backend == "nccl" else None
    device = torch.device("cuda", 0) if backend == "cuda" else CPU
    chosen = NcclBackend(fake, "fake_nccl", "cpu") if fake else backend_of(device.type)
    rank = Rank(WORKERS[number], port, folder, chosen, fake, device)
    globals()[scenario](rank)
    (folder / rank.worker).write_text(json.dumps(rank.measured))
