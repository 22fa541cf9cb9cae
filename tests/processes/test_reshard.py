"""Re-layouts in real processes, there and back: every region comes through bit by bit, and no byte
is sent that was in place (invariants 3 and 4)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import timedelta
from functools import cache
from math import prod
from multiprocessing import set_forkserver_preload
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from reference_geometry import lower_bound_bytes
from torch.multiprocessing import start_processes

from actors.distributed.state_transfer import LARGEST_BYTES, Moved, move
from actors.distributed.torch_private import bare_group
from elastic.geometry.assignment import Assignment
from elastic.geometry.layout import Layout
from elastic.geometry.shard_map import region_of
from elastic.geometry.tensor_specs import TensorSpec
from elastic.reshard.reshard_plan import ReshardPlan
from elastic.reshard.transfers import derive

NUM_PROCESSES = 6
WORKERS = tuple(f"w{i}" for i in range(NUM_PROCESSES))
TIMEOUT = timedelta(seconds=60)
CPU = torch.device("cpu")
COSTS = (1, 7, 7, 7, 7, 7, 3)


class Pair(NamedTuple):
    """Two layouts; the dead of the first are back in the second move."""

    a: str
    b: str
    dead: tuple[str, ...] = ()
    is_reversed: bool = False
    """Whether the members stand the other way round under `b`."""

    def __str__(self) -> str:
        dead = f" without {' '.join(self.dead)}" if self.dead else ""
        return f"{self.a} to {self.b}{' reversed' if self.is_reversed else ''}{dead}"

    def relayouts(self) -> dict[str, ReshardPlan]:
        """There and back."""
        a, b = Layout.parse(self.a), Layout.parse(self.b)
        living = tuple(worker for worker in WORKERS if worker not in self.dead)
        members = living[: b.num_workers][:: -1 if self.is_reversed else 1]
        first = Assignment(1, a, WORKERS[: a.num_workers])
        second, third = Assignment(2, b, members), Assignment(3, a, first.members)
        holders = tuple(worker for worker in first.members if worker not in self.dead)
        return {
            "there": ReshardPlan(1, 7, first, second, holders),
            "back": ReshardPlan(1, 7, second, third, members),
        }


PAIRS = (
    Pair("dp=1", "dp=3"),
    Pair("tp=2", "dp=2"),
    Pair("dp=4", "tp=4"),
    Pair("tp=4", "pp=4"),
    Pair("fsdp=4", "dp=2,fsdp=2", is_reversed=True),
    Pair("fsdp=5", "fsdp=3"),
    Pair("dp=2,fsdp=3", "fsdp=5", dead=("w1",)),
    Pair("pp=2,tp=2", "pp=3,fsdp=2"),
    Pair("fsdp=3,cp=2", "fsdp=2,tp=3"),
    Pair("fsdp=4,ep=2", "fsdp=2,tp=3,ep=3"),
    Pair("pp=2,fsdp=3,vp=2", "pp=3,dp=2"),
    Pair("dp=2,fsdp=2,zero=1", "pp=2,cp=2,ep=2", is_reversed=True),
)


def specs() -> tuple[TensorSpec, ...]:
    """Sizes that divide nothing, several dtypes, scalars, and one tensor of which the half is
    more than a window."""
    size = int((2.2 * LARGEST_BYTES["cpu"] / 4) ** 0.5)
    made = [
        TensorSpec("large", (size, size), "float32", None, 0, 1),
        TensorSpec("rows", (11, 3), "float64", None, 0, 0, kind="optimizer"),
        TensorSpec("few", (2, 5), "float32", None, 0, 1),
        TensorSpec("kept everywhere", (4, 3), "int64", kind="buffer"),
        TensorSpec("flags", (13,), "bool", None, 0, kind="buffer"),
    ]
    for layer in range(len(COSTS)):
        for name, shape, dtype, dims in (
            ("in", (17, 6), "bfloat16", (0, 0, None)),
            ("out", (6, 17), "float32", (0, 1, None)),
            ("experts", (7, 5, 3), "float32", (0, None, 0)),
            ("split experts", (5, 7, 2), "float64", (1, None, 0)),
            ("step", (), "float32", (None, None, None)),
        ):
            made.append(
                TensorSpec(f"{layer}.{name}", shape, dtype, layer, *dims, layer_costs=COSTS)
            )
    return tuple(made)


SPECS = specs()


def never() -> None:
    """Nobody interrupts."""


@cache
def whole(seed: int) -> torch.Tensor:
    """A tensor of random bits, not-a-numbers among them: the same in every process."""
    spec = SPECS[seed]
    num_bytes = prod(spec.shape) * spec.itemsize_bytes
    bits = torch.empty(num_bytes, dtype=torch.uint8)
    bits.random_(0, 2 if spec.dtype == "bool" else 256, generator=torch.manual_seed(seed))
    return bits.view(getattr(torch, spec.dtype)).view(spec.shape)


def parts(assignment: Assignment, worker: str) -> dict[str, torch.Tensor]:
    """What a worker holds."""
    if worker not in assignment.members:
        return {}
    held = {}
    for seed, spec in enumerate(SPECS):
        region = region_of(spec, assignment.layout, assignment.coordinates(worker))
        if region is not None:
            box = tuple(slice(o, o + n) for o, n in zip(region.offsets, region.shape, strict=True))
            held[spec.name] = whole(seed)[box].clone(memory_format=torch.contiguous_format)
    return held


def differing(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> list[str]:
    """The names of which the bits are not the same, or that one side lacks."""
    return [
        name
        for name in sorted(found.keys() | wanted.keys())
        if name not in found or name not in wanted or not same_bits(found[name], wanted[name])
    ]


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


def relay_out(
    reshard: ReshardPlan, worker: str, held: Mapping[str, torch.Tensor], store: dist.Store
) -> tuple[dict[str, torch.Tensor], Moved]:
    rank, num_ranks = reshard.transfer_rank(worker), len(reshard.participants)
    group = bare_group("cpu", store, rank, num_ranks, TIMEOUT)
    transfers = derive(SPECS, reshard, worker)
    parts_held = {} if transfers.own_part is None else {transfers.own_part: held}
    moved = move(SPECS, transfers, parts_held, group, CPU, never)
    group.barrier().wait()  # nobody hangs up while others still read
    return moved


def run_worker(rank: int, folder: Path) -> None:
    """One of the processes: take its part in all pairs, and tell what came of it."""
    torch.set_num_threads(1)
    worker = WORKERS[rank]
    file = dist.FileStore(str(folder / "store"), NUM_PROCESSES)
    told: dict[str, dict[str, Any]] = {}
    for pair in PAIRS:
        held: dict[str, torch.Tensor] = {}
        for direction, reshard in pair.relayouts().items():
            if worker not in reshard.participants:
                continue
            assert reshard.old is not None
            if direction == "there" and worker in reshard.holders:
                held = parts(reshard.old, worker)
            store = dist.PrefixStore(f"{pair} {direction}", file)
            new, moved = relay_out(reshard, worker, held, store)
            before = parts(reshard.old, worker) if worker in reshard.holders else {}
            told[f"{pair} {direction}"] = {
                "sent": moved.bytes_sent,
                "received": moved.bytes_received,
                "wrong": differing(new, parts(reshard.new, worker)),
                "spoilt": differing(held, before),
            }
            held = new
    (folder / f"{worker}.json").write_text(json.dumps(told))


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, Any]]]:
    """What each worker has to tell, all pairs moved by one start of the processes."""
    folder = tmp_path_factory.mktemp("reshard")
    set_forkserver_preload(["actors.distributed.state_transfer", "reference_geometry"])
    start_processes(run_worker, (folder,), NUM_PROCESSES, start_method="forkserver")
    return [json.loads((folder / f"{worker}.json").read_text()) for worker in WORKERS]


@pytest.mark.parametrize("direction", ["there", "back"])
@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_every_region_comes_through_and_nothing_needless_is_sent(told, pair, direction) -> None:
    reshard = pair.relayouts()[direction]
    mine = [of_worker.get(f"{pair} {direction}") for of_worker in told]
    took_part = [worker for worker, one in zip(WORKERS, mine, strict=True) if one is not None]
    assert took_part == sorted(reshard.participants)
    seen = [one for one in mine if one is not None]
    assert [one["wrong"] for one in seen] == [[]] * len(seen)
    assert [one["spoilt"] for one in seen] == [[]] * len(seen)
    bound = lower_bound_bytes(SPECS, reshard)
    assert sum(one["sent"] for one in seen) == bound
    assert sum(one["received"] for one in seen) == bound
    in_place = ("dp=4 to tp=4 there", "dp=1 to dp=3 back", "tp=2 to dp=2 back")
    assert bool(bound) == (f"{pair} {direction}" not in in_place)
