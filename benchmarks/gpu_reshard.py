"""How fast a reshard moves the state between two processes on GPUs, and the memory that it takes.

The shards of `fsdp=2` change places, so every byte moves. Bare messages of the same bytes are sent
in turn with it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from multiprocessing import set_forkserver_preload
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch
from gpu_groups import HOST, TIMEOUT_S, device_of_rank
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.multiprocessing import start_processes

from actors.distributed.backends.torch_groups_private import PeerMessage, exchange_all
from actors.distributed.groups import Formation
from actors.distributed.stall import wait_for
from actors.distributed.state_transfer import move
from actors.distributed.store import open_store
from elastic.geometry.assignment import Assignment
from elastic.geometry.layout import Layout
from elastic.geometry.regions import Region
from elastic.geometry.shard_map import region_of
from elastic.geometry.tensor_specs import TensorSpec
from elastic.protocol.commands import Form
from elastic.reshard.reshard_plan import ReshardPlan
from elastic.reshard.transfers import derive

WORKERS = ("w0", "w1")
OLD = Assignment(1, Layout(fsdp=2), WORKERS)
NEW = Assignment(2, Layout(fsdp=2), WORKERS[::-1])
NUM_ROUNDS = 5


def measure(device: str, num_bytes: int) -> dict[str, float]:
    """Medians of the seconds of a reshard and of bare messages, and the largest growth of a
    process' device memory above the new state, for a state of about `num_bytes`."""
    set_forkserver_preload(["actors.distributed.groups"])
    store = open_store(HOST)
    with TemporaryDirectory() as folder:
        arguments = (device, store.port, num_bytes, Path(folder))
        start_processes(_run_rank, arguments, 2, start_method="forkserver")
        results = [json.loads((Path(folder) / worker).read_text()) for worker in WORKERS]
    return {key: max(result[key] for result in results) for key in results[0]}


def _run_rank(rank: int, kind: str, port: int, num_bytes: int, folder: Path) -> None:
    device = device_of_rank(rank, 2, kind)
    width = 2048
    rows = num_bytes // (4 * width * 4)
    specs = tuple(TensorSpec(f"part-{i}", (rows // 2 * 2, width), fsdp_dim=0) for i in range(4))
    plan = ReshardPlan(0, 1, OLD, NEW, WORKERS)
    formation = Formation(WORKERS[rank], Form(2, NEW, plan, HOST, port), device, TIMEOUT_S)
    formation.form()
    group = formation.transfer
    assert group is not None
    held = {
        spec.name: torch.full(region.shape, float(rank), device=device)
        for spec in specs
        if (region := _region(spec, OLD, rank)) is not None
    }
    transfers = derive(specs, plan, WORKERS[rank])
    own_rank = OLD.world_rank(WORKERS[rank])

    def reshard() -> dict[str, Tensor]:
        return move(specs, transfers, {own_rank: held}, group, device, _interrupt_never)[0]

    arrived = reshard()
    if any(bool((tensor != 1.0 - rank).any()) for tensor in arrived.values()):
        raise RuntimeError("a reshard brought other values than were sent")
    del arrived
    grown_bytes = _growth(device, reshard) - transfers.bytes_needed
    messages = [torch.empty_like(tensor) for tensor in held.values()]

    def exchange() -> None:
        _exchange(group, device, held, messages)

    ours_s, bare_s = [], []
    for _ in range(NUM_ROUNDS):
        ours_s.append(_seconds(group, device, reshard))
        bare_s.append(_seconds(group, device, exchange))
    results = {
        "bytes": transfers.bytes_needed,
        "ours_s": median(ours_s),
        "bare_s": median(bare_s),
        "extra_bytes": grown_bytes,
    }
    (folder / WORKERS[rank]).write_text(json.dumps(results))
    formation.dissolve()


def _region(spec: TensorSpec, assignment: Assignment, rank: int) -> Region | None:
    return region_of(spec, assignment.layout, assignment.coordinates(WORKERS[rank]))


def _exchange(
    group: ProcessGroup,
    device: torch.device,
    held: dict[str, Tensor],
    messages: list[Tensor],
) -> None:
    peer = 1 - group.rank()
    receives = [PeerMessage(tensor, peer, 0) for tensor in messages]
    sends = [PeerMessage(tensor, peer, 0) for tensor in held.values()]
    for work in exchange_all(group, device, receives, sends):
        wait_for(work)


def _seconds(group: ProcessGroup, device: torch.device, work: Callable[[], object]) -> float:
    """The time that a rank takes, from a common start."""
    wait_for(group.allreduce([torch.zeros(1, device=device)]))
    _synchronize(device)
    began = time.perf_counter()
    work()
    _synchronize(device)
    return time.perf_counter() - began


def _growth(device: torch.device, work: Callable[[], object]) -> int:
    """How much the allocated memory of the device grows at most; 0 on a CPU."""
    if device.type != "cuda":
        work()
        return 0
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    work()
    return torch.cuda.max_memory_allocated(device) - before


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _interrupt_never() -> None:
    """The `check` that never raises."""
