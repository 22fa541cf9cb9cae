"""One process of `reshard.py`.

It executes its transfers as the product does, replays the same messages bare, and saves and loads
the same regions with torch.distributed.checkpoint (DCP).
"""

from __future__ import annotations

import ctypes
import gc
import json
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from math import prod
from pathlib import Path
from statistics import median
from tempfile import mkdtemp

import torch
import torch.distributed as dist
from dcp_regions import Part, load, save
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroup, TCPStore, Work
from transformer_state import lower_bound_bytes, transformer_state

from actors.distributed.backends.backend import backend_of, bare_group
from actors.distributed.state_transfer import move
from actors.distributed.transfer_windows import ALONE_BYTES
from actors.runtime.machine import keep_freed_memory
from elastic.geometry.assignment import Assignment
from elastic.geometry.layout import Layout
from elastic.geometry.regions import Region
from elastic.geometry.tensor_specs import TensorSpec
from elastic.reshard.reshard_plan import ReshardPlan
from elastic.reshard.transfers import Transfers, derive

CPU = torch.device("cpu")
HOST = "127.0.0.1"
TIMEOUT = timedelta(seconds=120)
TMPFS = "/dev/shm"
MIN_TIMED_BYTES = 16 * 2**20
KINDS = ("one run", "packed")

Specs = tuple[TensorSpec, ...]


@dataclass(frozen=True)
class Pair:
    """A change of layout; the workers are w0, w1, ... before and after."""

    old: str
    new: str
    has_experts: bool = False

    def __str__(self) -> str:
        return f"{self.old} -> {self.new}" + (" (experts)" if self.has_experts else "")

    def reshard(self) -> ReshardPlan:
        old, new = (
            Assignment(generation, layout, tuple(f"w{i}" for i in range(layout.num_workers)))
            for generation, layout in enumerate(map(Layout.parse, (self.old, self.new)), 1)
        )
        return ReshardPlan(0, 1, old, new, old.members)


@dataclass(frozen=True)
class Job:
    """The parameters of all processes."""

    pairs: tuple[Pair, ...]
    megabytes: int
    rounds: int
    port: int
    results: Path


@dataclass
class Rounds:
    """Alternating times of a move by the product, of its local part, and of its bare messages."""

    num_bytes: int
    ours_s: list[float] = field(default_factory=list)
    local_s: list[float] = field(default_factory=list)
    bare_s: list[float] = field(default_factory=list)

    @property
    def exchange_s(self) -> list[float]:
        return [ours - local for ours, local in zip(self.ours_s, self.local_s, strict=True)]

    @property
    def ratio(self) -> float:
        """The median ratio of the exchange's throughput to the bare one."""
        return median(b / e for b, e in zip(self.bare_s, self.exchange_s, strict=True))


@dataclass
class Measured:
    """The results of one pair."""

    state_bytes: int
    moved_bytes: int
    bound_bytes: int
    move_s: list[float]
    dcp_s: list[float]
    host_bytes: list[tuple[int, int]]
    """For each process: its maximum memory growth, and the allowed growth."""
    kinds: dict[str, Rounds]


@dataclass
class Counted:
    """A group that forwards sends and receives, and records them."""

    group: ProcessGroup
    messages: list[tuple[str, int, int]] = field(default_factory=list)

    def rank(self) -> int:
        return self.group.rank()

    def size(self) -> int:
        return self.group.size()

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Work:
        self.messages.append(("send", peer, tensors[0].nbytes))
        return self.group.send(tensors, peer, tag)

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> Work:
        self.messages.append(("recv", peer, tensors[0].nbytes))
        return self.group.recv(tensors, peer, tag)


@dataclass
class Site:
    """One pair in one process."""

    pair: Pair
    specs: Specs
    reshard: ReshardPlan
    rank: int
    transfer: ProcessGroup
    rounds: int

    @property
    def worker(self) -> str:
        return self.reshard.participants[self.rank]

    def measure(self) -> Measured:
        held = self.held()
        host_bytes = self.host_bytes(held)
        messages = self.messages(self.specs, held)
        sent = self.total(sum(size for kind, _, size in messages if kind == "send"))
        kinds = {}
        for kind, specs in split_by_packing(self.specs, self.reshard).items():
            rounds = self.time_kind(specs, held)
            if rounds is not None:
                kinds[kind] = rounds
        move_s, dcp_s = self.time_whole(held)
        return Measured(
            state_bytes=sum(spec.num_bytes for spec in self.specs),
            moved_bytes=sent,
            bound_bytes=lower_bound_bytes(self.specs, self.reshard),
            move_s=move_s,
            dcp_s=dcp_s,
            host_bytes=host_bytes,
            kinds=kinds,
        )

    def held(self) -> dict[str, Tensor]:
        regions = derive(self.specs, self.reshard, self.worker).own_regions
        return {self.specs[i].name: empty(self.specs[i], r).fill_(1) for i, r in regions.items()}

    def messages(self, specs: Specs, held: dict[str, Tensor]) -> list[tuple[str, int, int]]:
        """The messages that the product sends and receives, in order."""
        counted = Counted(self.transfer)
        self.move(specs, held, counted)
        return counted.messages

    def move(self, specs: Specs, held: dict[str, Tensor], group: object) -> dict[str, Tensor]:
        """Run the move, derivation included; without a group only its local copies."""
        transfers = derive(specs, self.reshard, self.worker)
        if group is None:
            transfers = replace(transfers, sends=[], receives=[])
        parts = {} if transfers.own_part is None else {transfers.own_part: held}
        return move(specs, transfers, parts, group, CPU, interrupt_never)[0]

    def time_kind(self, specs: Specs, held: dict[str, Tensor]) -> Rounds | None:
        messages = self.messages(specs, held)
        sent = self.total(sum(size for kind, _, size in messages if kind == "send"))
        if sent < MIN_TIMED_BYTES:
            return None
        buffers = [torch.ones(size, dtype=torch.uint8) for _, _, size in messages]
        rounds = Rounds(sent)
        for _ in range(self.rounds):
            rounds.ours_s.append(self.timed(lambda: self.move(specs, held, self.transfer)))
            rounds.local_s.append(self.timed(lambda: self.move(specs, held, None)))
            rounds.bare_s.append(self.timed(lambda: replay(self.transfer, messages, buffers)))
        return rounds

    def time_whole(self, held: dict[str, Tensor]) -> tuple[list[float], list[float]]:
        """Move the full state by the product and by DCP through a folder in memory, alternating."""
        transfers = derive(self.specs, self.reshard, self.worker)
        move_s, dcp_s = [], []
        for _ in range(self.rounds // 2 + 1):
            move_s.append(self.timed(lambda: self.move(self.specs, held, self.transfer)))
            folder = self.shared_folder()
            parts = self.parts(transfers.own_regions, held)
            saving_s = self.timed(lambda folder=folder, parts=parts: save(folder, parts))
            dcp_s.append(saving_s + self.timed(lambda f=folder: self.load(f, transfers)))
            if self.rank == 0:
                shutil.rmtree(folder)
        return move_s, dcp_s

    def load(self, folder: Path, transfers: Transfers) -> None:
        new = transfers.new_regions
        tensors = {self.specs[i].name: empty(self.specs[i], r) for i, r in new.items()}
        load(folder, self.parts(new, tensors))

    def parts(self, regions: dict[int, Region], tensors: dict[str, Tensor]) -> dict[str, Part]:
        specs = [(self.specs[index], region) for index, region in regions.items()]
        return {
            s.name: Part.from_region(tensors[s.name], r, s.shape)
            for s, r in specs
            if r.num_elements
        }

    def shared_folder(self) -> Path:
        folder = [mkdtemp(prefix="reshard-", dir=TMPFS) if self.rank == 0 else ""]
        dist.broadcast_object_list(folder, 0)
        return Path(folder[0])

    def host_bytes(self, held: dict[str, Tensor]) -> list[tuple[int, int]]:
        """The maximum growth of each process in a move, and the allowed one: the new regions that
        differ from the old ones. On CPU both exist at once, as nothing is staged."""
        transfers = derive(self.specs, self.reshard, self.worker)
        new = {i: r for i, r in transfers.new_regions.items() if i not in transfers.kept}
        allowed = sum(r.num_elements * self.specs[i].itemsize_bytes for i, r in new.items())
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # retained free memory would hide growth
        dist.barrier()
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak: see proc(5)
        before = resident_bytes("VmRSS")
        self.move(self.specs, held, self.transfer)
        growths: list[tuple[int, int]] = [(0, 0)] * dist.get_world_size()
        dist.all_gather_object(growths, (resident_bytes("VmHWM") - before, allowed))
        return growths

    def timed(self, work: Callable[[], object]) -> float:
        """The time of the slowest process, with a common start."""
        dist.barrier()
        began = time.perf_counter()
        work()
        took_s = torch.tensor(time.perf_counter() - began)
        dist.all_reduce(took_s, dist.ReduceOp.MAX)
        return took_s.item()

    def total(self, number: int) -> int:
        total = torch.tensor(number)
        dist.all_reduce(total)
        return int(total)


def run_rank(rank: int, job: Job) -> None:
    """Measure all pairs that have this rank."""
    torch.set_num_threads(1)
    gc.freeze()  # as the product's workers do
    keep_freed_memory()  # as the product's workers do
    client = TCPStore(HOST, job.port, is_master=False, timeout=TIMEOUT)
    for number, pair in enumerate(job.pairs):
        reshard = pair.reshard()
        num_ranks = len(reshard.participants)
        client.wait([f"pair-{number}"]) if rank else client.set(f"pair-{number}", "")
        if rank >= num_ranks:
            continue
        if rank == 0:
            print(f"{pair} ...", file=sys.stderr, flush=True)
        specs = transformer_state(job.megabytes, pair.has_experts)
        store = PrefixStore(str(number), client)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=num_ranks, timeout=TIMEOUT
        )
        prefixed = PrefixStore("transfer", store)
        transfer = bare_group(backend_of("cpu"), prefixed, rank, num_ranks, TIMEOUT)
        measured = Site(pair, specs, reshard, rank, transfer, job.rounds).measure()
        if rank == 0:
            (job.results / f"{number}.json").write_text(json.dumps(asdict(measured)))
        dist.barrier()
        dist.destroy_process_group()


def split_by_packing(specs: Specs, reshard: ReshardPlan) -> dict[str, Specs]:
    """Split the tensors into those without packing, whose pieces are contiguous on both sides and
    sent alone, and all others."""
    packed_indices = set()
    for worker in reshard.participants:
        transfers = derive(specs, reshard, worker)
        for pieces, held in (
            (transfers.sends, transfers.own_regions),
            (transfers.receives, transfers.new_regions),
        ):
            packed_indices |= {
                p.tensor for p in pieces if not is_run_alone(p.region, held[p.tensor])
            }
    packed = tuple(spec for i, spec in enumerate(specs) if i in packed_indices)
    contiguous = tuple(spec for i, spec in enumerate(specs) if i not in packed_indices)
    return {"one run": contiguous, "packed": packed}


def is_run_alone(region: Region, held: Region) -> bool:
    """Whether a piece of a float32 tensor is contiguous in memory and sent alone."""
    cut = next((dim for dim, size in enumerate(region.shape) if size > 1), 0)
    is_one_run = region.shape[cut + 1 :] == held.shape[cut + 1 :]
    return is_one_run and 4 * prod(region.shape) >= ALONE_BYTES["cpu"]


def replay(
    group: ProcessGroup, messages: Sequence[tuple[str, int, int]], buffers: Sequence[Tensor]
) -> None:
    """Send and receive the messages, all at once, from and into existing buffers."""
    works = [
        (group.send if kind == "send" else group.recv)([buffer], peer, 0)
        for (kind, peer, _), buffer in zip(messages, buffers, strict=True)
    ]
    for work in works:
        work.wait()


def empty(spec: TensorSpec, region: Region) -> Tensor:
    return torch.empty(region.shape, dtype=getattr(torch, spec.dtype))


def resident_bytes(field_name: str) -> int:
    """`VmRSS`, this process's resident memory, or `VmHWM`, its peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    line = next(line for line in lines if line.startswith(field_name))
    return int(line.split()[1]) * 1024


def interrupt_never() -> None:
    """The `interrupt` that never raises."""
