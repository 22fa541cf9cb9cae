"""What differs between Gloo and NCCL when groups are formed, aborted and dissolved."""

from __future__ import annotations

import gc
from datetime import timedelta
from typing import Any, Protocol

import torch.distributed as dist
from torch.distributed import ProcessGroup, Store

from actors.distributed.backends.gloo import GlooBackend
from actors.distributed.backends.nccl import Nccl, NcclBackend
from actors.distributed.backends.torch_groups_private import (
    BackendArguments,
    as_group,
    reset_group_tables,
)


class GroupBackend(Protocol):
    """The groups of this process on one type of device.

    The training thread creates them, one generation at a time. Any other thread may call `abort`,
    also while a group is being created.
    """

    name: str
    """The name under which torch creates groups by `create`."""

    device_type: str

    loses_wake_ups: bool
    """Whether a call on an aborted group may stay blocked."""

    can_be_left: bool
    """Whether a thread that creates groups may be abandoned: it cannot change torch's tables
    afterwards."""

    def prepare(self, store: Store, num_ranks: int, timeout: timedelta) -> None:
        """Prepare for the first group of a generation; each of its ranks calls this once. Raises
        torch's errors if another rank does not arrive."""

    def options(self, timeout: timedelta) -> Any:
        """New options of one group. They are never shared: torch changes them."""

    def create(self, arguments: BackendArguments, options: Any) -> Any:
        """Create this rank's end of a group. Raises torch's errors, and RuntimeError after an
        abort."""

    def abort(self) -> None:
        """Make every blocked or future call on the groups raise, or end with garbage."""

    def forget(self) -> None:
        """Release the groups: nothing uses them any more, and others may be created."""


_BACKENDS: dict[str, GroupBackend] = {}


def backend_of(device_type: str) -> GroupBackend:
    """The backend of this process for a type of device, made when it is first used."""
    if device_type not in _BACKENDS:
        is_gpu = device_type == "cuda"
        _BACKENDS[device_type] = NcclBackend(Nccl()) if is_gpu else GlooBackend()
    return _BACKENDS[device_type]


def init_world(
    backend: GroupBackend, store: Store, rank: int, num_ranks: int, timeout: timedelta
) -> None:
    """Make a group of all ranks torch's default group.

    It is bound to no device: torch would split it for each further group, and a split needs ranks
    that are not in that group.
    """
    dist.init_process_group(
        backend.name,
        store=store,
        rank=rank,
        world_size=num_ranks,
        timeout=timeout,
        pg_options=backend.options(timeout),
    )


def bare_group(
    backend: GroupBackend, store: Store, rank: int, num_ranks: int, timeout: timedelta
) -> ProcessGroup:
    """A group outside of the world, which may contain processes that are not in the world.

    `new_group` accepts only ranks of the world.
    """
    arguments = BackendArguments(store, rank, num_ranks, "transfer", list(range(num_ranks)))
    created = backend.create(arguments, backend.options(timeout))
    return as_group(created, backend.device_type, arguments)


def dissolve_groups(backend: GroupBackend) -> None:
    """Remove all groups of this process; the caller has dropped what uses them."""
    backend.forget()
    reset_group_tables()
    gc.collect()
