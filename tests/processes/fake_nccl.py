"""A communicator library that connects, blocks and aborts as NCCL does, and moves bytes by Gloo."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import TCPStore

from actors.distributed.backends.gloo_sockets import shut_gloo_connections
from actors.distributed.backends.torch_groups_private import BackendArguments, gloo_options
from actors.distributed.backends.waiting import waiting

POLL_S = 0.002
NEVER_S = 100.0
"""Longer than any test waits."""


@dataclass(eq=False)
class FakeEnd:
    """One rank's end of a communicator."""

    arguments: BackendArguments
    options: Any
    is_aborted: bool = False


@dataclass
class FakeNccl:
    """An `NcclEngine`.

    - `connect` ends when all ranks have called it, or when this end is aborted. It has a
      connection of its own to the store: shutting the generation's does not end it.
    - `abort` waits until all ends of this process are being aborted, as an operation on a device
      is queued behind one of another communicator. So aborts one after another never end.
    """

    port: int
    calls: list[str] = field(default_factory=list)
    """The calls in the order of their beginnings."""
    before_connecting: Callable[[FakeEnd], None] = lambda end: None
    after_connecting: Callable[[], object] = lambda: None
    ends: list[FakeEnd] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def options(self, timeout: timedelta) -> Any:
        return gloo_options(timeout, [dist.ProcessGroupGloo.create_default_device()])

    def create(self, arguments: BackendArguments, options: Any) -> FakeEnd:
        end = FakeEnd(arguments, options)
        with self.lock:
            # The backend forgets a generation's ends when it is over; so do its aborts.
            self.ends = [other for other in self.ends if not other.is_aborted] + [end]
        self.calls.append(f"create {arguments.name}")
        return end

    def connect(self, end: FakeEnd, arguments: BackendArguments, check: Callable[[], None]) -> Any:
        self.calls.append(f"connect {arguments.name}")
        self.before_connecting(end)
        self._meet(end)
        end.options.global_ranks_in_group = arguments.global_ranks
        end.options.group_name = arguments.name
        backend = dist.ProcessGroupGloo(
            arguments.store, arguments.rank, arguments.num_ranks, end.options
        )
        self.after_connecting()
        return backend

    def abort(self, end: FakeEnd) -> None:
        self.calls.append(f"abort {end.arguments.name}")
        end.is_aborted = True
        deadline = time.monotonic() + NEVER_S
        while not all(other.is_aborted for other in self.ends) and time.monotonic() < deadline:
            time.sleep(POLL_S)
        shut_gloo_connections()

    def _meet(self, end: FakeEnd) -> None:
        """Wait for the other ranks. The key is of the generation's store, which no other has."""
        own = TCPStore("127.0.0.1", self.port, is_master=False, wait_for_workers=False)
        token = f"fake {end.arguments.name}"
        if end.arguments.rank == 0:
            key = f"meeting {time.monotonic_ns()}"
            end.arguments.store.set(token, key)
        key = end.arguments.store.get(token).decode()
        own.add(key, 1)
        while own.add(key, 0) < end.arguments.num_ranks:
            if end.is_aborted:
                raise RuntimeError(f"communicator {end.arguments.name} was aborted")
            waiting(time.sleep, POLL_S)
