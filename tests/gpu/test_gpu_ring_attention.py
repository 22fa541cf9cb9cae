"""Ring attention of two processes on one GPU, over NCCL, equals plain attention."""

from __future__ import annotations

from datetime import timedelta
from multiprocessing import set_forkserver_preload
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from gpu_groups import separate_hosts
from one_gpu import NEEDS_GPU
from test_ring_attention import TIMEOUT_S, Case, compare, ring_results
from torch.multiprocessing import start_processes

from pipelines.training.attention.ring_attention import uses_flash
from pipelines.training.workload.ring import GPU_TILE

pytestmark = NEEDS_GPU

BY_FLASH = (
    *(Case(2, length, torch.bfloat16, head_dim=16) for length in (5, 16, 19)),
    Case(2, 5 * GPU_TILE + 3, torch.bfloat16, heads=4, kv_heads=2, batch=1, head_dim=64),
)
CASES = (
    *(Case(2, length, with_documents=length > 5) for length in (1, 5, 16, 19)),
    *(Case(2, 37, dtype, with_documents=True) for dtype in (torch.float32, torch.bfloat16)),
    Case(2, 5 * GPU_TILE + 3, heads=1, kv_heads=1, batch=1, with_documents=True),
    *BY_FLASH,
)


def run_rank(cp_rank: int, folder: Path) -> None:
    """Compute all cases in one of the processes."""
    separate_hosts()
    torch.cuda.set_device(0)
    store = dist.FileStore(str(folder / "store"), 2)
    timeout = timedelta(seconds=TIMEOUT_S)
    dist.init_process_group("nccl", store=store, world_size=2, rank=cp_rank, timeout=timeout)
    for case in CASES:
        results = ring_results(case, dist.group.WORLD, "cuda")
        torch.save(tuple(tensor.cpu() for tensor in results), folder / f"{case}-{cp_rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the results of two processes."""
    folder = tmp_path_factory.mktemp("ring")
    set_forkserver_preload(["pipelines.training.attention.ring_attention"])
    start_processes(run_rank, (folder,), 2, start_method="forkserver")
    return folder


@pytest.mark.parametrize("case", BY_FLASH, ids=str)
def test_the_flash_kernel_computes_blocks_of_16_bit_heads(case: Case) -> None:
    heads = torch.zeros(1, 2, 8, case.head_dim, dtype=case.dtype, device="cuda")
    assert uses_flash(heads, heads, heads)
    assert not uses_flash(*[heads.float()] * 3)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_outputs_and_gradients_equal_plain_attention(folder: Path, case: Case) -> None:
    compare(folder, case)
