"""Forming, aborting and dissolving the process groups of a generation."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta

import torch
from torch.distributed import PrefixStore, ProcessGroup, Store, TCPStore

from actors.distributed.backends.backend import (
    GroupBackend,
    backend_of,
    bare_group,
    dissolve_groups,
    init_world,
)
from actors.distributed.backends.gloo_sockets import shut_connections_to
from actors.distributed.meshes import form_groups
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
        backend: GroupBackend | None = None,
    ) -> None:
        """`secret` is the run's: without it the store keys of the groups cannot be guessed.
        `backend` is by default that of the device's type."""
        self._worker = worker
        self._order = order
        self._device = device
        self._timeout = timedelta(seconds=timeout_s)
        self._has_experts = has_experts
        self._prefix = store_prefix(secret, order.generation)
        self._backend = backend or backend_of(device.type)
        self._is_forming = False
        self._breaking = threading.Lock()
        self._dissolved = False
        self.created_ns = time.time_ns()
        """As the flight recorder counts time; see `collectives.group_progress`."""
        self.groups: Groups | None = None
        self.transfer: ProcessGroup | None = None

    @property
    def can_lose_wake_ups(self) -> bool:
        """Whether an abort may leave the training thread blocked: on Gloo, and while NCCL
        connects."""
        return self._backend.loses_wake_ups or self._is_forming

    def form(self, abandonable: Callable[[], AbstractContextManager[None]] = nullcontext) -> None:
        """Form the groups with the other workers of the generation, through the store.

        `abandonable` is entered while the calling thread may be abandoned. Raises torch's errors if
        the store or a peer is gone, or after the timeout.
        """
        with abandonable() if self._backend.can_be_left else nullcontext():
            self._is_forming = True
            self._form()
            self._is_forming = False

    def _form(self) -> None:
        order = self._order
        client = TCPStore(
            order.store_host,
            order.store_port,
            is_master=False,
            wait_for_workers=False,
            timeout=self._timeout,
        )
        store = PrefixStore(self._prefix, client)
        self._backend.prepare(store, len(order.plan.participants), self._timeout)
        if self._worker in order.assignment.members:
            self.groups = self._form_world(store)
        self.transfer = self._form_transfer(store)

    def abort(self) -> None:
        """Abort: make every blocked or future call on these groups raise."""
        with self._breaking:
            if self._dissolved:
                return
            shut_connections_to(self._order.store_host, self._order.store_port)
            self._backend.abort()

    def dissolve(self) -> None:
        """Remove the generation from torch's tables; the caller has dropped model and mesh."""
        with self._breaking:
            self._dissolved = True
            self.groups = self.transfer = None
            dissolve_groups(self._backend)

    def _form_world(self, store: Store) -> Groups:
        order = self._order
        world_rank = order.assignment.world_rank(self._worker)
        num_ranks = order.assignment.layout.num_workers
        init_world(self._backend, store, world_rank, num_ranks, self._timeout)
        return form_groups(
            self._backend,
            order.assignment,
            world_rank,
            self._device,
            self._timeout,
            self._has_experts,
        )

    def _form_transfer(self, store: Store) -> ProcessGroup | None:
        """The world's own group if all participants of the transfers are its members."""
        plan = self._order.plan
        if plan.participants == self._order.assignment.members:
            assert self.groups is not None
            return self.groups.world
        return bare_group(
            self._backend,
            PrefixStore("transfer", store),
            plan.transfer_rank(self._worker),
            len(plan.participants),
            self._timeout,
        )
