"""Ring attention over several processes equals plain attention over the full sequence."""

from __future__ import annotations

from datetime import timedelta
from itertools import pairwise
from multiprocessing import set_forkserver_preload
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing import start_processes
from torch.nn.functional import scaled_dot_product_attention

from pipelines.training.attention.ring_attention import (
    FlashRingAttention,
    TiledRingAttention,
    ring_attention,
    uses_flash,
)
from pipelines.training.workload.ring import CPU_TILE, Ring, positions

NUM_PROCESSES = 4
MEMBERS = {2: (1, 3), 3: (0, 2, 3), 4: (0, 1, 2, 3)}
"""The world ranks of each group; they mostly differ from the group ranks."""
TIMEOUT_S = 60.0
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}
HEAD_DIM = 6


class Case(NamedTuple):
    """A sequence and the settings of its computation."""

    size: int
    length: int
    dtype: torch.dtype = torch.float64
    heads: int = 4
    kv_heads: int = 2
    with_documents: bool = False
    batch: int = 2
    function: str = "chosen"
    head_dim: int = HEAD_DIM

    def __str__(self) -> str:
        return "-".join(map(str, self))


CASES = (
    *(
        Case(size, length, with_documents=with_documents)
        for size in MEMBERS
        for length in (1, 5, 16, 19)
        for with_documents in (False, True)
    ),
    *(Case(3, 19, heads=3, kv_heads=kv_heads) for kv_heads in (1, 3)),
    *(Case(4, 37, dtype, with_documents=True) for dtype in (torch.float32, torch.bfloat16)),
    *(
        Case(size, length, function="flash")
        for size in MEMBERS
        for length in (1, 5, 16, 19, CPU_TILE + 3)
    ),
    *(Case(3, 19, heads=3, kv_heads=kv_heads, function="flash") for kv_heads in (1, 3)),
    *(
        Case(4, 37, dtype, function=function)
        for dtype in (torch.float32, torch.bfloat16)
        for function in ("flash", "tiles", "chosen")
    ),
    Case(2, 5 * CPU_TILE + 3, heads=1, kv_heads=1, batch=1),
    Case(2, 5 * CPU_TILE + 3, heads=1, kv_heads=1, batch=1, with_documents=True),
)


class Tensors(NamedTuple):
    """Query, key, value and the gradient of the output, each (batch, length, heads, head_dim)."""

    query: Tensor
    key: Tensor
    value: Tensor
    grad: Tensor


def build_inputs(case: Case) -> tuple[Tensors, Tensor | None]:
    """The inputs, equal in every process, and documents with another border in each sample."""
    generator = torch.Generator().manual_seed(case.length)
    shapes = [
        (case.batch, case.length, heads, case.head_dim) for heads in (case.heads, case.kv_heads)
    ]
    tensors = [torch.randn(shapes[i], generator=generator).to(case.dtype) for i in (0, 1, 1, 0)]
    begins = torch.rand(case.batch, case.length, generator=generator) < 4 / case.length
    return Tensors(*tensors), begins.cumsum(1) if case.with_documents else None


def forward_and_backward(attend, tensors: Tensors) -> Tensors:
    """The output and the gradients; heads before positions, without a copy, as in the model."""
    *inputs, grad = (tensor.clone() for tensor in tensors)
    output = attend(*(heads.requires_grad_().transpose(1, 2) for heads in inputs)).transpose(1, 2)
    output.backward(grad)
    return Tensors(*(heads.grad for heads in inputs), output.detach())


def plain_attention(case: Case) -> Tensors:
    """Plain attention over the full sequence, in float64."""
    tensors, documents = build_inputs(case)
    allowed = torch.ones(1, 1, case.length, case.length, dtype=torch.bool).tril()
    if documents is not None:
        allowed = allowed & (documents[:, None, :, None] == documents[:, None, None, :])

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return scaled_dot_product_attention(query, key, value, attn_mask=allowed, enable_gqa=True)

    return forward_and_backward(attend, Tensors(*(tensor.double() for tensor in tensors)))


def ring_results(case: Case, group: dist.ProcessGroup, device: str = "cpu") -> Tensors:
    """The results of this rank for its positions."""
    tensors, documents = build_inputs(case)
    own_positions = positions(case.length, group.rank(), group.size())

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if case.function == "chosen":
            return ring_attention(query, key, value, case.length, group, documents)
        function = FlashRingAttention if case.function == "flash" else TiledRingAttention
        return function.apply(query, key, value, Ring(case.length, group, documents))

    return forward_and_backward(
        attend, Tensors(*(tensor[:, own_positions].to(device) for tensor in tensors))
    )


def count_work(group: dist.ProcessGroup, length: int) -> tuple[int, int]:
    """The number of pairs whose scores this rank computes, and of tiles that it masks."""
    ring = Ring(length, group)
    device = torch.device("cpu")
    tiles = [tile for source in range(ring.size) for tile in ring.tiles(source, device)]
    num_pairs = sum(
        (tile.queries.stop - tile.queries.start) * (tile.keys.stop - tile.keys.start)
        for tile in tiles
    )
    return num_pairs, sum(tile.masked is not None for tile in tiles)


def error_without_peer(group: dist.ProcessGroup) -> str:
    """The message of the error that attention raises after a rank has left the group."""
    try:
        ring_results(Case(2, 16), group)
    except RuntimeError as error:
        return str(error)
    return ""


def run_rank(world_rank: int, folder: Path) -> None:
    """Compute all cases that have a group with this rank."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), NUM_PROCESSES)
    timeout = timedelta(seconds=TIMEOUT_S)
    dist.init_process_group(
        "gloo", store=store, world_size=NUM_PROCESSES, rank=world_rank, timeout=timeout
    )
    groups = {size: dist.new_group(MEMBERS[size], timeout=timeout) for size in MEMBERS}
    own_groups = {size: group for size, group in groups.items() if world_rank in MEMBERS[size]}
    for case in CASES:
        if case.size in own_groups:
            group = own_groups[case.size]
            torch.save(tuple(ring_results(case, group)), folder / f"{case}-{group.rank()}.pt")
    torch.save(count_work(groups[4], 8 * CPU_TILE), folder / f"work-{world_rank}.pt")
    dist.barrier()
    first, second = MEMBERS[2]
    if world_rank == first:
        torch.save(error_without_peer(groups[2]), folder / "raised.pt")
    if world_rank != second:
        dist.destroy_process_group()


def compare(folder: Path, case: Case) -> None:
    """Compare the results of the ranks to plain attention."""
    expected, tolerance = plain_attention(case), TOLERANCES[case.dtype]
    for cp_rank in range(case.size):
        own_positions = positions(case.length, cp_rank, case.size)
        actual = Tensors(*torch.load(folder / f"{case}-{cp_rank}.pt"))
        for tensor, expected_tensor in zip(actual, expected, strict=True):
            assert tensor.dtype == case.dtype
            torch.testing.assert_close(
                tensor.double(), expected_tensor[:, own_positions], rtol=tolerance, atol=tolerance
            )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the results of four processes."""
    folder = tmp_path_factory.mktemp("ring")
    set_forkserver_preload(["pipelines.training.attention.ring_attention"])
    start_processes(run_rank, (folder,), NUM_PROCESSES, start_method="forkserver")
    return folder


@pytest.mark.parametrize("case", CASES, ids=str)
def test_outputs_and_gradients_equal_plain_attention(folder: Path, case: Case) -> None:
    compare(folder, case)


def test_all_ranks_compute_little_more_than_the_causal_half(folder: Path) -> None:
    """With one tile per chunk: 2 * size + 1 of 4 * size tiles, two of them partly masked."""
    works = [torch.load(folder / f"work-{cp_rank}.pt") for cp_rank in range(NUM_PROCESSES)]
    assert works == [((2 * NUM_PROCESSES + 1) * CPU_TILE**2, 2)] * NUM_PROCESSES


def test_errors_of_a_broken_group_propagate(folder: Path) -> None:
    assert torch.load(folder / "raised.pt")


@pytest.mark.parametrize("num_cp_ranks", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("length", [1, 2, 5, 16, 19, 84, 1000])
def test_the_positions_of_all_ranks_are_the_sequence(length: int, num_cp_ranks: int) -> None:
    positions_of_ranks = [
        positions(length, cp_rank, num_cp_ranks) for cp_rank in range(num_cp_ranks)
    ]
    assert sorted(torch.cat(positions_of_ranks).tolist()) == list(range(length))
    assert all(
        earlier < later
        for rank_positions in positions_of_ranks
        for earlier, later in pairwise(rank_positions.tolist())
    )


@pytest.mark.parametrize("num_cp_ranks", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("length", [84, 168, 1000, 1001])
def test_every_rank_has_the_same_share_of_the_causal_pairs(length, num_cp_ranks) -> None:
    shares = [
        int((positions(length, cp_rank, num_cp_ranks) + 1).sum()) for cp_rank in range(num_cp_ranks)
    ]
    divides = length % (2 * num_cp_ranks) == 0
    assert max(shares) - min(shares) <= (0 if divides else 2 * length)


def test_the_flash_kernel_computes_blocks_on_the_cpu_in_float32_only() -> None:
    heads = torch.zeros(1, 2, 5, HEAD_DIM)
    chosen = {dtype: uses_flash(*[heads.to(dtype)] * 3) for dtype in TOLERANCES}
    assert chosen == {torch.float64: False, torch.float32: True, torch.bfloat16: False}


def test_tensors_of_another_length_are_refused() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), world_size=1, rank=0)
    try:
        heads = torch.zeros(1, 2, 5, HEAD_DIM)
        with pytest.raises(ValueError, match="this rank has 6 positions"):
            ring_attention(heads, heads, heads, 6, dist.group.WORLD)
        with pytest.raises(ValueError, match="documents"):
            ring_attention(heads, heads, heads, 5, dist.group.WORLD, torch.zeros(1, 6))
    finally:
        dist.destroy_process_group()
