"""Forming, aborting and dissolving the process groups of a generation."""

from __future__ import annotations

import gc
import threading
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, ProcessGroup, Store, TCPStore

from actors.distributed.gloo_sockets import shut_connections_to, shut_gloo_connections
from actors.distributed.meshes import form_groups
from actors.distributed.torch_private import (
    abort_nccl_groups,
    bare_group,
    disable_nccl_watchdog,
    group_options,
    reset_group_tables,
)
from actors.runtime.handshake import store_prefix
from actors.runtime.program import Groups
from elastic.protocol.commands import Form


class Formation:
    """The process groups of one process in one generation.

    The training thread calls `form` and `dissolve`. Any other thread may call `abort` at any
    time, also while `form` blocks: it makes the training thread's calls raise.
    """

    def __init__(
        self,
        worker: str,
        order: Form,
        device: torch.device,
        timeout_s: float,
        has_experts: bool = False,
        secret: bytes = b"",
    ) -> None:
        """`secret` is the run's: without it the store keys of the groups cannot be guessed."""
        self._worker = worker
        self._order = order
        self._device = device
        self._timeout = timedelta(seconds=timeout_s)
        self._has_experts = has_experts
        self._prefix = store_prefix(secret, order.generation)
        self._breaking = threading.Lock()
        self._dissolved = False
        self.groups: Groups | None = None
        self.transfer: ProcessGroup | None = None

    @property
    def can_lose_wake_ups(self) -> bool:
        """Whether an aborted group may leave a call blocked: Gloo does; NCCL's abort ends all."""
        return self._device.type == "cpu"

    def form(self) -> None:
        """Form the groups with the other workers of the generation, through the store.

        Raises torch's errors if the store or a peer is gone, or after the timeout.
        """
        order = self._order
        client = TCPStore(
            order.store_host,
            order.store_port,
            is_master=False,
            wait_for_workers=False,
            timeout=self._timeout,
        )
        store = PrefixStore(self._prefix, client)
        if self._worker in order.assignment.members:
            self.groups = self._form_world(store)
        self.transfer = self._form_transfer(store)

    def abort(self) -> None:
        """Abort: make every blocked or future call on these groups raise."""
        with self._breaking:
            if self._dissolved:
                return
            shut_connections_to(self._order.store_host, self._order.store_port)
            if self._device.type == "cuda":
                abort_nccl_groups(self.transfer)
            else:
                shut_gloo_connections()

    def dissolve(self) -> None:
        """Remove the generation from torch's tables; the caller has dropped model and mesh."""
        with self._breaking:
            self._dissolved = True
            self.groups = self.transfer = None
            reset_group_tables()
        gc.collect()

    def _form_world(self, store: Store) -> Groups:
        order, device_type = self._order, self._device.type
        world_rank = order.assignment.world_rank(self._worker)
        disable_nccl_watchdog()
        backend, options = group_options(device_type, self._timeout)
        dist.init_process_group(
            backend,
            store=store,
            rank=world_rank,
            world_size=order.assignment.layout.num_workers,
            timeout=self._timeout,
            pg_options=options,
            device_id=_current_gpu() if device_type == "cuda" else None,
        )
        return form_groups(
            order.assignment, world_rank, self._device, self._timeout, self._has_experts
        )

    def _form_transfer(self, store: Store) -> ProcessGroup | None:
        """The world's own group if all participants of the transfers are its members."""
        plan = self._order.plan
        if plan.participants == self._order.assignment.members:
            assert self.groups is not None
            return self.groups.world
        return bare_group(
            self._device.type,
            PrefixStore("transfer", store),
            plan.transfer_rank(self._worker),
            len(plan.participants),
            self._timeout,
        )


def _current_gpu() -> torch.device:
    """The device with its index, which torch needs to bind a group to a device."""
    return torch.device("cuda", torch.cuda.current_device())
