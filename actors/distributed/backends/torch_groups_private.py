"""All uses of torch's private names for process groups, each with the reason why the public API
does not suffice."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Store, Work
from torch.distributed import distributed_c10d as c10d
from torch.distributed.tensor import DTensor

from actors.distributed.backends.waiting import launching

NUM_GLOO_THREADS = 2
"""Threads of each group: torch's own default."""


@dataclass(frozen=True)
class BackendArguments:
    """What torch passes to the function that creates a rank's end of a group."""

    store: Store
    rank: int
    num_ranks: int
    name: str
    global_ranks: list[int]


def register(
    name: str, create: Callable[[BackendArguments, Any], Any], device_types: list[str]
) -> None:
    """Let torch create the groups of this backend name by `create(arguments, options)`.

    torch passes its own arguments as a private type.
    """

    def created(theirs: Any, options: Any) -> Any:
        # torch leaves the ranks of a default group empty after a process' first one.
        ranks = theirs.global_ranks_in_group or range(theirs.group_size)
        arguments = BackendArguments(
            theirs.store, theirs.group_rank, theirs.group_size, theirs.group_id, list(ranks)
        )
        return create(arguments, options)

    dist.Backend.register_backend(name, created, extended_api=True, devices=device_types)


def gloo_options(timeout: timedelta, devices: Sequence[Any]) -> Any:
    """Options of a Gloo group on these devices. A mesh ignores the world's timeout, and no public
    option sets it."""
    options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timeout
    options._devices = list(devices)
    options._threads = NUM_GLOO_THREADS
    return options


def nccl_options(timeout: timedelta) -> Any:
    """Options of an NCCL group whose communicator does not block; see `gloo_options`."""
    options: Any = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    options.config.blocking = 0
    return options


def as_group(backend: Any, device_type: str, arguments: BackendArguments) -> ProcessGroup:
    """A group of this backend that is not in torch's tables, as torch makes its own."""
    group = ProcessGroup(arguments.store, arguments.rank, arguments.num_ranks)
    group._set_group_desc(arguments.name)
    kind = ProcessGroup.BackendType.CUSTOM
    group._set_default_backend(kind)
    group._register_backend(torch.device(device_type), kind, backend)
    return group


@dataclass(frozen=True)
class PeerMessage:
    """A tensor to send to a peer, or to receive from it."""

    tensor: Tensor
    peer: int
    tag: int


def exchange_all(
    group: ProcessGroup,
    device: torch.device,
    receives: Sequence[PeerMessage],
    sends: Sequence[PeerMessage],
) -> list[Work]:
    """Start to send and to receive; on NCCL this is one operation.

    NCCL runs the operations of a pair of ranks in order: two ranks that both receive first would
    deadlock. The public `batch_isend_irecv` accepts only groups in torch's tables.
    """
    on_gpu = device.type == "cuda"
    if on_gpu:
        group._start_coalescing(device)
    works = [group.recv([message.tensor], message.peer, message.tag) for message in receives]
    works += [group.send([message.tensor], message.peer, message.tag) for message in sends]
    return [launching(group._end_coalescing, device)] if on_gpu else works


def flight_recorder(device_type: str) -> dict[str, Any]:
    """torch's record of the newest collectives of this process, which has no public name; empty in
    a torch without it."""
    name = "_dump_nccl_trace_json" if device_type == "cuda" else "_dump_fr_trace_json"
    dump = getattr(torch._C._distributed_c10d, name, None)
    recorded: dict[str, Any] = json.loads(dump(True, False)) if dump is not None else {}
    return recorded


def groups_in_use() -> list[ProcessGroup]:
    """Every group in torch's tables, which have no public names."""
    return list(c10d._world.pg_map)


def reset_group_tables() -> None:
    """Remove all groups from torch's tables, half-formed ones as well.

    A failed `init_process_group` leaves a group count with which the next one never meets the other
    ranks (FACTS: process groups). The cache of sharding decisions returns meshes of old
    generations.
    """
    world = c10d._world
    for group in sorted(world.pg_names, key=lambda g: world.pg_names[g], reverse=True):
        # An aborted group may fail to shut down; it is removed below all the same.
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
        getattr(world, "pg_flight_recorder_hooks", {}),  # since torch 2.15
    ):
        table.clear()
    world.group_count = 0
    c10d._unregister_all_process_groups()
    _clear_sharding_caches()


def _clear_sharding_caches() -> None:
    """As `torch.distributed.tensor.debug` does it, without importing it: it imports the compiler,
    which would cost each command and worker 1 s."""
    clear_fast_path = getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", None)
    if clear_fast_path is None:  # another version of torch
        import_module("torch.distributed.tensor.debug")._clear_sharding_prop_cache()
        return
    dispatcher: Any = DTensor._op_dispatcher
    dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()
    clear_fast_path()
