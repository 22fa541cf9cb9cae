"""Reshards in real processes, there and back: each region arrives bit by bit, and only missing
bytes are sent (invariants 3 and 4)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import cache
from itertools import product
from math import prod
from multiprocessing import set_forkserver_preload
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
import torch.distributed as dist
from reference_geometry import lower_bound_bytes
from torch.multiprocessing import start_processes

from actors.distributed.backends.backend import backend_of, bare_group
from actors.distributed.exchange import Exchange, Moved, RoundExchange, SteppedExchange
from actors.distributed.state_transfer import move
from actors.distributed.transfer_windows import LARGEST_BYTES, TransferWindow, Windows
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
    """Two layouts; workers that are dead in the first reshard take part in the second."""

    a: str
    b: str
    dead: tuple[str, ...] = ()
    is_reversed: bool = False
    """Whether `b` has the members in reverse order."""

    def __str__(self) -> str:
        dead = f" without {' '.join(self.dead)}" if self.dead else ""
        return f"{self.a} to {self.b}{' reversed' if self.is_reversed else ''}{dead}"

    def plans(self) -> dict[str, ReshardPlan]:
        """Plan the reshards from `a` to `b` and back."""
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


def build_specs() -> tuple[TensorSpec, ...]:
    """Build specs with indivisible sizes, several dtypes, scalars, and one tensor of which half
    exceeds a transfer window."""
    size = int((2.2 * LARGEST_BYTES["cpu"] / 4) ** 0.5)
    tensor_specs = [
        TensorSpec("large", (size, size), "float32", None, 0, 1),
        TensorSpec("rows", (11, 3), "float64", None, 0, 0, kind="optimizer"),
        TensorSpec("few", (2, 5), "float32", None, 0, 1),
        TensorSpec("replicated", (4, 3), "int64", kind="buffer"),
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
            tensor_specs.append(
                TensorSpec(f"{layer}.{name}", shape, dtype, layer, *dims, layer_costs=COSTS)
            )
    return tuple(tensor_specs)


SPECS = build_specs()


class SmallRounds(RoundExchange):
    """The exchange of GPUs, in many rounds. It records the windows of each round by peer."""

    round_bytes = 6 * 2**20
    recorded: ClassVar[list[dict[str, dict[str, list[int]]]]] = []

    def begin(self, outgoing: Windows, incoming: Windows) -> None:
        super().begin(outgoing, incoming)
        for sends, receives in self.rounds:
            self.recorded.append({"sent": sizes_of(sends), "received": sizes_of(receives)})


def sizes_of(windows: Sequence[TransferWindow]) -> dict[str, list[int]]:
    """The sizes of windows in their order, by the peer's transfer rank."""
    return {
        str(peer): [w.num_bytes for w in windows if w.peer == peer]
        for peer in {window.peer for window in windows}
    }


EXCHANGES: dict[str, type[Exchange]] = {"steps": SteppedExchange, "rounds": SmallRounds}


def interrupt_never() -> None:
    """An `Interrupt` that never raises."""


@cache
def random_tensor(seed: int) -> torch.Tensor:
    """A tensor of random bits, including NaNs: the same in every process."""
    spec = SPECS[seed]
    num_bytes = prod(spec.shape) * spec.itemsize_bytes
    bits = torch.empty(num_bytes, dtype=torch.uint8)
    bits.random_(0, 2 if spec.dtype == "bool" else 256, generator=torch.manual_seed(seed))
    return bits.view(getattr(torch, spec.dtype)).view(spec.shape)


def shard_of(assignment: Assignment, worker: str) -> dict[str, torch.Tensor]:
    """The regions that a worker holds."""
    if worker not in assignment.members:
        return {}
    tensors = {}
    for seed, spec in enumerate(SPECS):
        region = region_of(spec, assignment.layout, assignment.coordinates(worker))
        if region is not None:
            box = tuple(slice(o, o + n) for o, n in zip(region.offsets, region.shape, strict=True))
            tensors[spec.name] = random_tensor(seed)[box].clone(
                memory_format=torch.contiguous_format
            )
    return tensors


def differing_names(
    actual: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]
) -> list[str]:
    """The names of tensors whose bits differ, or that one side lacks."""
    return [
        name
        for name in sorted(actual.keys() | expected.keys())
        if name not in actual or name not in expected or not same_bits(actual[name], expected[name])
    ]


def same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    return torch.equal(first.reshape(-1).view(torch.uint8), second.reshape(-1).view(torch.uint8))


def reshard_worker(
    reshard: ReshardPlan,
    worker: str,
    held_tensors: Mapping[str, torch.Tensor],
    store: dist.Store,
    exchange_type: type[Exchange],
) -> tuple[dict[str, torch.Tensor], Moved]:
    transfer_rank, num_ranks = reshard.transfer_rank(worker), len(reshard.participants)
    group = bare_group(backend_of("cpu"), store, transfer_rank, num_ranks, TIMEOUT)
    transfers = derive(SPECS, reshard, worker)
    tensors_of_part = {} if transfers.own_part is None else {transfers.own_part: held_tensors}
    parts = transfers, tensors_of_part, group, CPU, interrupt_never
    moved = move(SPECS, *parts, exchange_type=exchange_type)
    group.barrier().wait()  # no worker closes its connections while others still read
    return moved


def run_worker(rank: int, folder: Path) -> None:
    """Run one worker process through all pairs, and write its results."""
    torch.set_num_threads(1)
    worker = WORKERS[rank]
    file = dist.FileStore(str(folder / "store"), NUM_PROCESSES)
    results: dict[str, dict[str, Any]] = {}
    for name, pair in product(EXCHANGES, PAIRS):
        held_tensors: dict[str, torch.Tensor] = {}
        for direction, reshard in pair.plans().items():
            if worker not in reshard.participants:
                continue
            assert reshard.old is not None
            if direction == "there" and worker in reshard.holders:
                held_tensors = shard_of(reshard.old, worker)
            key = f"{pair} {direction} in {name}"
            store = dist.PrefixStore(key, file)
            SmallRounds.recorded.clear()
            new_tensors, moved = reshard_worker(
                reshard, worker, held_tensors, store, EXCHANGES[name]
            )
            tensors_before = shard_of(reshard.old, worker) if worker in reshard.holders else {}
            results[key] = {
                "transfer_rank": reshard.transfer_rank(worker),
                "rounds": list(SmallRounds.recorded),
                "sent": moved.bytes_sent,
                "received": moved.bytes_received,
                "wrong": differing_names(new_tensors, shard_of(reshard.new, worker)),
                "overwritten": differing_names(held_tensors, tensors_before),
            }
            held_tensors = new_tensors
    (folder / f"{worker}.json").write_text(json.dumps(results))


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, Any]]]:
    """The results of each worker; one start of the processes runs all pairs."""
    folder = tmp_path_factory.mktemp("reshard")
    set_forkserver_preload(["actors.distributed.state_transfer", "reference_geometry"])
    start_processes(run_worker, (folder,), NUM_PROCESSES, start_method="forkserver")
    return [json.loads((folder / f"{worker}.json").read_text()) for worker in WORKERS]


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("direction", ["there", "back"])
@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_reshard_delivers_each_region_and_sends_only_missing_bytes(
    results, pair, direction, exchange
) -> None:
    reshard = pair.plans()[direction]
    results_of_pair = [by_name.get(f"{pair} {direction} in {exchange}") for by_name in results]
    participants = [
        worker
        for worker, result in zip(WORKERS, results_of_pair, strict=True)
        if result is not None
    ]
    assert participants == sorted(reshard.participants)
    present = [result for result in results_of_pair if result is not None]
    assert [result["wrong"] for result in present] == [[]] * len(present)
    assert [result["overwritten"] for result in present] == [[]] * len(present)
    bound = lower_bound_bytes(SPECS, reshard)
    assert sum(result["sent"] for result in present) == bound
    assert sum(result["received"] for result in present) == bound
    in_place = ("dp=4 to tp=4 there", "dp=1 to dp=3 back", "tp=2 to dp=2 back")
    assert bool(bound) == (f"{pair} {direction}" not in in_place)


@pytest.mark.parametrize("direction", ["there", "back"])
@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_both_workers_of_a_pair_put_the_same_windows_into_the_same_round(
    results, pair, direction
) -> None:
    """A round on NCCL waits for all its messages, so one in another round would wait for ever."""
    key = f"{pair} {direction} in rounds"
    by_rank = {
        result[key]["transfer_rank"]: result[key]["rounds"] for result in results if key in result
    }
    for rank, rounds in by_rank.items():
        for number, round_of_sender in enumerate(rounds):
            for peer, sizes in round_of_sender["sent"].items():
                received = by_rank[int(peer)][number]["received"]
                assert received[str(rank)] == sizes


def test_large_reshards_take_many_rounds_of_bounded_size(results) -> None:
    rounds = [
        window_sizes
        for result in results
        for by_name in result.values()
        for window_sizes in by_name["rounds"]
    ]
    num_rounds = [len(by_name["rounds"]) for result in results for by_name in result.values()]
    assert max(num_rounds) >= 3
    for sizes in rounds:
        sent = [sum(sizes_to_peer) for sizes_to_peer in sizes["sent"].values()]
        assert sum(sent) <= SmallRounds.round_bytes + len(sent) * LARGEST_BYTES["cpu"]
