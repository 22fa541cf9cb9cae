"""The only file that touches torch's private names; each use says why there is no public way."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, Store
from torch.distributed import distributed_c10d as c10d
from torch.distributed.tensor import DTensor

SHARED_GLOO = "shared_gloo"
NUM_GLOO_THREADS = 2
"""Of each group; as many as torch itself gives it."""
_gloo_device: list[Any] = []
"""The device of this generation's Gloo groups, once there is one."""


def group_options(device_type: str, timeout: timedelta) -> tuple[str, Any]:
    """Backend name and options for one group: a mesh ignores the world's timeout."""
    if device_type == "cuda":
        options: Any = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return "nccl", options
    if not _gloo_device:
        _gloo_device.append(_device_of(os.environ.get("GLOO_SOCKET_IFNAME", "")))
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timeout
    options._devices = list(_gloo_device)
    options._threads = NUM_GLOO_THREADS
    return SHARED_GLOO, options


def _device_of(interface: str) -> Any:
    """The default one does not look at the variable, and where the machine's name does not resolve
    to an address that others reach, it offers them the loopback."""
    if interface:
        return dist.ProcessGroupGloo.create_device(interface=interface)
    return dist.ProcessGroupGloo.create_default_device()


def _gloo_group(arguments: Any, options: Any) -> Any:
    """What torch calls for a group of this backend. Its own `gloo` makes a device a group, and
    each device has a thread that wakes a hundred times a second, whether anything comes or not."""
    options.global_ranks_in_group = arguments.global_ranks_in_group
    options.group_name = arguments.group_id
    return dist.ProcessGroupGloo(
        arguments.store, arguments.group_rank, arguments.group_size, options
    )


dist.Backend.register_backend(SHARED_GLOO, _gloo_group, extended_api=True, devices=["cpu"])


def bare_group(
    device_type: str, store: Store, group_rank: int, num_ranks: int, timeout: timedelta
) -> ProcessGroup:
    """A group beside the world's, which may hold processes that are not in the world.

    `new_group` would only take ranks of the world.
    """
    group = ProcessGroup(store, group_rank, num_ranks)
    _, options = group_options(device_type, timeout)
    backend: Any
    if device_type == "cuda":
        kind = ProcessGroup.BackendType.NCCL
        backend = dist.ProcessGroupNCCL(store, group_rank, num_ranks, options)
    else:
        kind = ProcessGroup.BackendType.GLOO
        backend = dist.ProcessGroupGloo(store, group_rank, num_ranks, options)
    group._set_default_backend(kind)
    group._register_backend(torch.device(device_type), kind, backend)
    return group


@contextmanager
def exchanged_together(group: ProcessGroup, device: torch.device) -> Iterator[None]:
    """Sends and receives inside of it are one operation on NCCL, which runs those of a pair of
    ranks in order: two that both receive first would wait for each other for ever."""
    if device.type != "cuda":
        yield
        return
    group._start_coalescing(device)
    yield
    group._end_coalescing(device).wait()


def all_threads() -> Any:
    """For torch.profiler, which would trace the calling thread alone: a user's own loop trains on
    another, and who ends the trace may be another. There is no public way to ask for it."""
    return torch._C._profiler._ExperimentalConfig(profile_all_threads=True)


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
    groups = groups_in_use()
    for group in groups:
        group._get_backend(torch.device("cuda")).abort()
    if bare is not None and bare not in groups:
        bare._get_backend(torch.device("cuda")).abort()


def groups_in_use() -> list[ProcessGroup]:
    """Every group that torch's tables know of."""
    return list(c10d._world.pg_map)


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
    _gloo_device.clear()
    _clear_sharding_caches()


def _clear_sharding_caches() -> None:
    """As `torch.distributed.tensor.debug` does it; to import that takes 1 s, as it imports the
    compiler, and each command and worker would pay for it."""
    clear_fast_path = getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", None)
    if clear_fast_path is None:  # another version of torch
        import_module("torch.distributed.tensor.debug")._clear_sharding_prop_cache()
        return
    dispatcher: Any = DTensor._op_dispatcher
    dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()
    clear_fast_path()
