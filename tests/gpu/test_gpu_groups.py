"""NCCL groups in plain processes: form, abort, form again, reshard."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import set_forkserver_preload
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gpu_groups import separate_hosts
from one_gpu import NEEDS_GPU
from torch.multiprocessing import start_processes

from actors.distributed.groups import Formation
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

pytestmark = NEEDS_GPU

DEVICE = torch.device("cuda")
HOST = "127.0.0.1"
WORKERS = ("a", "b")
TIMEOUT_S = 60.0
BREAK_AFTER_S = 0.5
MAX_BLOCKED_S = 10.0

SHARDED = Assignment(1, Layout(fsdp=2), WORKERS)
TARGETS = {
    "swapped": Assignment(2, Layout(fsdp=2), ("b", "a")),
    "one takes all": Assignment(2, Layout(), ("a",)),
    "replicated": Assignment(2, Layout(dp=2), WORKERS),
}
SPECS = (
    TensorSpec("wide", (1024, 2048), fsdp_dim=0),
    TensorSpec("odd", (7, 3), "float64", fsdp_dim=0),
    TensorSpec("deep", (1024, 1024), fsdp_dim=0),
    TensorSpec("count", (), kind="optimizer"),
)


def interrupt_never() -> None:
    """The `interrupt` that never raises."""


def run_in_two_processes(run: Callable[..., None], argument: Any) -> None:
    """Call `run(rank, port of a store, argument)` in two processes; fail if either fails."""
    set_forkserver_preload(["actors.distributed.groups"])
    store = open_store(HOST)
    start_processes(run, (store.port, argument), 2, start_method="forkserver")


def form_group(worker: str, reshard: ReshardPlan, port: int) -> Formation:
    order = Form(reshard.new.generation, reshard.new, reshard, HOST, port)
    formation = Formation(worker, order, DEVICE, TIMEOUT_S)
    formation.form()
    return formation


def form_generation(worker: str, generation: int, port: int) -> Formation:
    assignment = Assignment(generation, Layout(dp=2), WORKERS)
    return form_group(worker, ReshardPlan(0, 0, None, assignment), port)


def all_reduce_ones(formation: Formation) -> float:
    ones = torch.ones(1, device=DEVICE)
    formation.groups.world.allreduce([ones]).wait()
    return ones.item()


def time_blocked_collective(formation: Formation) -> float:
    """The time for which a collective without its peer blocks until the abort."""
    began = time.monotonic()
    threading.Timer(BREAK_AFTER_S, formation.abort).start()
    with suppress(RuntimeError):
        all_reduce_ones(formation)  # after an abort NCCL may also return, with garbage
    return time.monotonic() - began


def abort_and_form_again(rank: int, port: int, folder: Path) -> None:
    """Run one of two processes: `a` blocks and is aborted, `b` is absent; then both form again."""
    separate_hosts()
    worker = WORKERS[rank]
    formation = form_generation(worker, 1, port)
    results = {"first": all_reduce_ones(formation)}
    if worker == "a":
        results["blocked_s"] = time_blocked_collective(formation)
    store = dist.TCPStore(HOST, port, is_master=False)
    store.set(f"{worker} is done", "") if worker == "a" else store.wait(["a is done"])
    formation.abort()
    formation.dissolve()
    formation = form_generation(worker, 2, port)
    results["second"] = all_reduce_ones(formation)
    formation.dissolve()
    (folder / worker).write_text(json.dumps(results))


def test_abort_unblocks_a_collective_and_the_processes_form_again(tmp_path: Path) -> None:
    run_in_two_processes(abort_and_form_again, tmp_path)
    results = {worker: json.loads((tmp_path / worker).read_text()) for worker in WORKERS}
    assert [results[worker]["first"] for worker in WORKERS] == [2.0, 2.0]
    assert [results[worker]["second"] for worker in WORKERS] == [2.0, 2.0]
    assert BREAK_AFTER_S * 0.9 < results["a"]["blocked_s"] < MAX_BLOCKED_S


def full_tensor(spec: TensorSpec) -> torch.Tensor:
    num_elements = Region.whole(spec.shape).num_elements
    return torch.arange(num_elements, dtype=getattr(torch, spec.dtype)).reshape(spec.shape)


def shard_of(assignment: Assignment, worker: str) -> dict[str, torch.Tensor]:
    """A worker's tensors under an assignment, on the host."""
    if worker not in assignment.members:
        return {}
    coordinates = assignment.coordinates(worker)
    shards = {}
    for spec in SPECS:
        offsets, shape = region_of(spec, assignment.layout, coordinates)
        slices = tuple(slice(o, o + n) for o, n in zip(offsets, shape, strict=True))
        shards[spec.name] = full_tensor(spec)[slices].clone()
    return shards


def reshard_worker(rank: int, port: int, target: str) -> None:
    """Run one of two processes: reshard the state, and compare it to the expected one."""
    separate_hosts()
    worker = WORKERS[rank]
    reshard = ReshardPlan(0, 1, SHARDED, TARGETS[target], WORKERS)
    formation = form_group(worker, reshard, port)
    held = {name: tensor.to(DEVICE) for name, tensor in shard_of(SHARDED, worker).items()}
    transfers = derive(SPECS, reshard, worker)
    actual, moved = move(
        SPECS, transfers, {rank: held}, formation.transfer, DEVICE, interrupt_never
    )
    expected = shard_of(TARGETS[target], worker)
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert actual[name].device.type == DEVICE.type
        assert torch.equal(actual[name].cpu(), tensor), name
    assert moved.bytes_received == transfers.bytes_needed
    store = dist.TCPStore(HOST, port, is_master=False, wait_for_workers=False)
    store.set(f"{worker} has its part", "")
    store.wait([f"{name} has its part" for name in WORKERS])  # a sender that leaves breaks the link
    formation.dissolve()


@pytest.mark.parametrize("target", TARGETS)
def test_reshard_moves_every_element_to_its_region(target: str) -> None:
    run_in_two_processes(reshard_worker, target)
