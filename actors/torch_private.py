"""The only file that touches torch's private names; each use says why there is no public way."""

from __future__ import annotations

import os
from contextlib import suppress
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, Store
from torch.distributed import distributed_c10d as c10d
from torch.distributed.tensor.debug import _clear_sharding_prop_cache


def group_options(device_type: str, timeout: timedelta) -> tuple[str, Any]:
    """Backend name and options for one mesh axis: a mesh ignores the world's timeout."""
    if device_type == "cuda":
        options: Any = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return "nccl", options
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timeout
    return "gloo", options


def bare_group(
    device_type: str, store: Store, group_rank: int, num_ranks: int, timeout: timedelta
) -> ProcessGroup:
    """A group beside the world's, which may hold processes that are not in the world."""
    if device_type == "cuda":
        _, options = group_options(device_type, timeout)
        nccl = dist.ProcessGroupNCCL(store, group_rank, num_ranks, options)
        return cast(ProcessGroup, nccl)
    return cast(ProcessGroup, dist.ProcessGroupGloo(store, group_rank, num_ranks, timeout))


def leave_aborts_to_us() -> None:
    """Keep NCCL's watchdog from ending a survivor's process; to be called before the first group.

    By default it tears the process down when a peer dies; the controller decides that here.
    """
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    os.environ.setdefault("TORCH_NCCL_ENABLE_MONITORING", "0")


def abort_nccl_groups(bare: ProcessGroup | None) -> None:
    """Abort every NCCL communicator of this process, from any thread.

    `bare` is a group that torch's own tables do not know of.
    """
    groups = list(c10d._world.pg_map)
    for group in groups:
        group._get_backend(torch.device("cuda")).abort()
    if bare is not None and bare not in groups:
        bare.abort()


def reset_group_tables() -> None:
    """Make torch forget all groups, also half-formed ones.

    A failed `init_process_group` leaves a group count behind with which the next forming never
    meets the other ranks (FACTS: process groups), and the cache of sharding decisions hands out
    meshes of dead generations.
    """
    world = c10d._world
    for group in sorted(world.pg_names, key=lambda g: world.pg_names[g], reverse=True):
        # An aborted group may refuse to close in order; it is forgotten below all the same.
        with suppress(RuntimeError):
            group.shutdown()
    c10d._update_default_pg(None)
    for table in (
        world.pg_map,
        world.pg_names,
        world.pg_group_ranks,
        world.pg_backend_config,
        world.pg_to_tag,
        world.tags_to_pg,
        world.pg_coalesce_state,
    ):
        table.clear()
    world.group_count = 0
    c10d._unregister_all_process_groups()
    _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]
