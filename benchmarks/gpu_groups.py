"""How long it takes to form, abort and form again the groups of two or more processes.

One process a GPU; on a machine with one GPU two processes share it, each as a host of its own.
"""

from __future__ import annotations

import json
import os
import threading
import time
from contextlib import suppress
from multiprocessing import set_forkserver_preload
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing import start_processes

from actors.distributed.groups import Formation
from actors.distributed.store import open_store
from elastic.geometry.assignment import Assignment
from elastic.geometry.layout import Layout
from elastic.protocol.commands import Form
from elastic.reshard.reshard_plan import ReshardPlan

HOST = "127.0.0.1"
TIMEOUT_S = 60.0
BLOCKED_S = 0.3
NUM_CYCLES = 20


def measure(device: str, num_cycles: int = NUM_CYCLES) -> dict[str, float]:
    """Medians over the cycles, and the slowest abort."""
    num_ranks = max(2, torch.cuda.device_count()) if device == "cuda" else 2
    set_forkserver_preload(["actors.distributed.groups"])
    store = open_store(HOST)
    with TemporaryDirectory() as folder:
        arguments = (num_ranks, device, store.port, Path(folder), num_cycles)
        start_processes(_run_rank, arguments, num_ranks, start_method="forkserver")
        cycles: list[dict[str, float]] = json.loads((Path(folder) / "cycles").read_text())
    later = {key: median(cycle[key] for cycle in cycles[1:]) for key in cycles[0]}
    return {
        "num_ranks": num_ranks,
        "first_form_s": cycles[0]["form_s"],
        **later,
        "slowest_abort_s": max(cycle["abort_s"] for cycle in cycles),
    }


def separate_hosts() -> None:
    """Let NCCL accept several processes on one GPU: it refuses them on one host. They communicate
    through sockets on the loopback interface. To be called before NCCL is first used."""
    os.environ["NCCL_HOSTID"] = f"process-{os.getpid()}"
    os.environ["NCCL_SOCKET_IFNAME"] = "lo"
    os.environ["NCCL_IB_DISABLE"] = "1"


def device_of_rank(rank: int, num_ranks: int, kind: str) -> torch.device:
    """The CPU, or this rank's own GPU, or a GPU that it shares with other ranks."""
    if kind == "cpu":
        return torch.device(kind)
    num_gpus = torch.cuda.device_count()
    if num_gpus < num_ranks:
        separate_hosts()
    device = torch.device(kind, rank % num_gpus)
    torch.cuda.set_device(device)
    return device


def _run_rank(
    rank: int, num_ranks: int, kind: str, port: int, folder: Path, num_cycles: int
) -> None:
    """Form the groups again and again; in each cycle rank 0 blocks in a collective in which the
    others do not take part, and is aborted."""
    device = device_of_rank(rank, num_ranks, kind)
    cycles = [_cycle(rank, num_ranks, device, port, number) for number in range(num_cycles)]
    if rank == 0:
        (folder / "cycles").write_text(json.dumps(cycles))


def _cycle(
    rank: int, num_ranks: int, device: torch.device, port: int, number: int
) -> dict[str, float]:
    workers = tuple(f"w{rank}" for rank in range(num_ranks))
    assignment = Assignment(number + 1, Layout(dp=num_ranks), workers)
    plan = ReshardPlan(0, 0, None, assignment)
    order = Form(assignment.generation, assignment, plan, HOST, port)
    times: dict[str, float] = {}

    def timed(name: str, began: float) -> float:
        now = time.perf_counter()
        times[name] = now - began
        return now

    began = time.perf_counter()
    formation = Formation(workers[rank], order, device, TIMEOUT_S)
    formation.form()
    assert formation.groups is not None
    formed = timed("form_s", began)
    if _sum_of_ones(formation, device) != num_ranks:
        raise RuntimeError(f"a collective of {num_ranks} ranks returned another sum")
    timed("collective_s", formed)
    key = f"cycle {number} is aborted"
    if rank == 0:
        aborted_at: list[float] = []

        def abort() -> None:
            aborted_at.append(time.perf_counter())
            formation.abort()

        threading.Timer(BLOCKED_S, abort).start()
        with suppress(RuntimeError):  # after an abort NCCL may also return, with garbage
            _sum_of_ones(formation, device)
        timed("abort_s", aborted_at[0])
        dist.TCPStore(HOST, port, is_master=False).set(key, "")  # the abort has shut all others
    else:
        dist.TCPStore(HOST, port, is_master=False).wait([key])
        formation.abort()
    began = time.perf_counter()
    formation.dissolve()
    timed("dissolve_s", began)
    return times


def _sum_of_ones(formation: Formation, device: torch.device) -> float:
    ones: Any = torch.ones(1, device=device)
    assert formation.groups is not None
    formation.groups.world.allreduce([ones]).wait()
    return float(ones.item())
