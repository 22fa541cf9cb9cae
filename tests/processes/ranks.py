"""Process groups of one rank in plain processes, without a fleet."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from actors.distributed.backends.backend import backend_of
from actors.distributed.meshes import form_groups
from actors.runtime.program import Groups
from elastic.geometry.assignment import Assignment
from elastic.geometry.layout import Layout

CPU = torch.device("cpu")
TIMEOUT = timedelta(seconds=200)
"""Long enough for a rank that is in no group of a layout: it waits for the others at the next."""
GENERATION = 7


def open_file_store(folder: Path, num_ranks: int) -> dist.FileStore:
    """Open the store in which the processes of a test form all layouts, each under its name."""
    return dist.FileStore(str(folder / "store"), num_ranks)


@contextmanager
def default_group(store: dist.Store, name: str, world_rank: int, num_ranks: int) -> Iterator[None]:
    """A default group; leaving the block destroys it and all groups formed in it."""
    prefixed = dist.PrefixStore(name, store)
    dist.init_process_group(
        "gloo", store=prefixed, world_size=num_ranks, rank=world_rank, timeout=TIMEOUT
    )
    yield
    dist.barrier()
    dist.destroy_process_group()


@contextmanager
def formed_groups(
    layout: Layout, store: dist.Store, name: str, world_rank: int, has_experts: bool = False
) -> Iterator[Groups]:
    """The groups of this rank under a layout, formed as a worker forms them."""
    members = tuple(f"w{rank}" for rank in range(layout.num_workers))
    with default_group(store, name, world_rank, layout.num_workers):
        assignment = Assignment(GENERATION, layout, members)
        yield form_groups(backend_of("cpu"), assignment, world_rank, CPU, TIMEOUT, has_experts)
