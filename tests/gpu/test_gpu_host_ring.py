"""The ring of pinned slots on a GPU: copies are right, overlap with compute, and hold the apply."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import torch
from one_gpu import NEEDS_GPU
from torch import Tensor

from actors.host_memory.copy_engine import CudaEngine
from actors.host_memory.host_copy import HostCopy, copy_tensors
from actors.host_memory.host_ring import NUM_SLOTS, SLOT_BYTES, HostRing, ring_for

pytestmark = NEEDS_GPU
TIMEOUT_S = 60.0
DEVICE = torch.device("cuda", 0)


def drawn() -> list[Tensor]:
    """Larger than the whole ring, small, empty, of several dtypes, and not contiguous."""
    return [
        torch.randn(5 * NUM_SLOTS * SLOT_BYTES // 16, device=DEVICE),
        torch.randn(7, device=DEVICE).bfloat16(),
        torch.randn(2000, 3000, dtype=torch.float64, device=DEVICE).T,
        torch.zeros(0, 3, device=DEVICE),
        torch.tensor(3, device=DEVICE),
        torch.rand(13, device=DEVICE) > 0.5,
    ]


def occupy(seconds: float) -> None:
    """Keep the current stream busy for about so long."""
    torch.cuda._sleep(int(seconds * 1e9))  # cycles, of which a GPU has one to two a nanosecond


def test_downloads_and_uploads_keep_every_bit() -> None:
    tensors = drawn()
    copied = HostCopy(tensors).to_host(tensors)
    for tensor, copy in zip(tensors, copied, strict=True):
        assert copy.device.type == "cpu" and torch.equal(copy, tensor.cpu())
    back = [torch.zeros_like(tensor) for tensor in tensors]
    copy_tensors(list(zip(copied, back, strict=True)))
    assert all(torch.equal(a, b) for a, b in zip(back, tensors, strict=True))


def test_process_has_one_ring_of_pinned_memory() -> None:
    tensors = drawn()
    ring = ring_for(tensors)
    assert ring is not None and ring is ring_for(tensors[:1])
    assert CudaEngine(DEVICE).allocate(64).is_pinned()


def test_copies_see_the_work_before_them_and_none_after() -> None:
    """The compute stream is busy when the copy begins, and the apply is issued during the copy."""
    source = torch.zeros(4 * NUM_SLOTS * SLOT_BYTES // 4, device=DEVICE)
    torch.cuda.synchronize()
    occupy(0.1)
    source.fill_(1.0)
    copy = HostCopy([source])
    with ThreadPoolExecutor(1) as pool:
        copying = pool.submit(copy.to_host, [source])
        assert copy.hold_changes(TIMEOUT_S)
        source.fill_(2.0)
        [copied] = copying.result(TIMEOUT_S)
    assert bool((copied == 1.0).all()) and bool((source == 2.0).all())


def test_copy_does_not_wait_for_later_compute() -> None:
    source = torch.ones(2 * NUM_SLOTS * SLOT_BYTES // 4, device=DEVICE)
    HostCopy([source]).to_host([source])  # allocates the ring
    torch.cuda.synchronize()
    copy = HostCopy([source])
    occupy(2.0)
    began = time.perf_counter()
    copy.to_host([source])
    assert time.perf_counter() - began < 0.5
    assert not torch.cuda.current_stream(DEVICE).query(), "the compute stream is still busy"
    torch.cuda.synchronize()


def test_two_threads_copy_at_once() -> None:
    ring = HostRing(CudaEngine(DEVICE))
    sources = [torch.full((3 * SLOT_BYTES,), value, device=DEVICE) for value in (1.0, 2.0, 3.0)]
    with ThreadPoolExecutor(3) as pool:
        copies = [pool.submit(HostCopy([s], ring).to_host, [s]) for s in sources]
        for source, copy in zip(sources, copies, strict=True):
            assert torch.equal(copy.result(TIMEOUT_S)[0], source.cpu())
