"""The groups of one rank among plain processes, without a fleet."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from actors.distributed.meshes import form_groups
from actors.runtime.program import Groups
from elastic.geometry.assignment import Assignment
from elastic.geometry.layout import Layout

CPU = torch.device("cpu")
TIMEOUT = timedelta(seconds=200)
"""A rank that has no part in some layouts waits at the next for those that have."""
GENERATION = 7


def open_file_store(folder: Path, num_ranks: int) -> dist.FileStore:
    """One store for all layouts that the processes of a test form, each under its own name."""
    return dist.FileStore(str(folder / "store"), num_ranks)


@contextmanager
def world(store: dist.Store, name: str, world_rank: int, num_ranks: int) -> Iterator[None]:
    """A default group, which is gone afterwards with all that were made inside it."""
    prefixed = dist.PrefixStore(name, store)
    dist.init_process_group(
        "gloo", store=prefixed, world_size=num_ranks, rank=world_rank, timeout=TIMEOUT
    )
    yield
    dist.barrier()
    dist.destroy_process_group()


@contextmanager
def formed(
    layout: Layout, store: dist.Store, name: str, world_rank: int, has_experts: bool = False
) -> Iterator[Groups]:
    """This rank's groups under a layout, as a worker forms them."""
    members = tuple(f"w{rank}" for rank in range(layout.num_workers))
    with world(store, name, world_rank, layout.num_workers):
        assignment = Assignment(GENERATION, layout, members)
        yield form_groups(assignment, world_rank, CPU, TIMEOUT, has_experts)
