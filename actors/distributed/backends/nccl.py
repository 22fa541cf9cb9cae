"""Groups on NCCL that a death during forming cannot strand.

- Communicators do not block: an abort reaches them while they connect (`ncclCommInitRank` blocks
  without a limit otherwise). Each is known here before it connects; torch would register it only
  afterwards.
- A generation's ranks meet at the store before the first communicator, since a wait there can be
  ended. Each group is connected as it is created, so that no later exchange has to connect all.
- An abort ends all communicators at once. One after another, the abort of a communicator may wait
  for an operation on the device that is queued behind one of another communicator (nccl#1013).
- The survivors outlive a peer: by default torch's watchdog would end them.
"""

from __future__ import annotations

import os
import threading
import time
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed import Store

from actors.distributed.backends.torch_groups_private import (
    BackendArguments,
    nccl_options,
    register,
)
from actors.distributed.backends.waiting import waiting

SETTINGS = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_NONBLOCKING_TIMEOUT": "600",
}
"""Set before a process' first group, where torch reads them. The watchdog and the heartbeat monitor
do not end the process: the controller decides that, and it aborts a forming that takes too long.
The last, in seconds, only limits a communicator that no abort reaches."""

ABORT_TIMEOUT_S = 2.0
"""How long a call of `abort` waits for a device that hangs; the caller repeats it."""


class GroupsAborted(RuntimeError):
    """A group was requested of a generation that has been aborted."""


class NcclEngine(Protocol):
    """The calls of NCCL; tests replace them."""

    def options(self, timeout: timedelta) -> Any:
        """New options of a communicator that does not block."""

    def create(self, arguments: BackendArguments, options: Any) -> Any:
        """This rank's end of a group, not connected yet; needs no other rank."""

    def connect(self, end: Any) -> Any:
        """Connect an end with the other ranks; returns torch's backend. Raises RuntimeError."""

    def abort(self, end: Any) -> None:
        """Abort an end, also while it connects."""


class Nccl:
    """The `NcclEngine` of torch, on this process's current GPU."""

    def options(self, timeout: timedelta) -> Any:
        return nccl_options(timeout)

    def create(self, arguments: BackendArguments, options: Any) -> Any:
        options.global_ranks_in_group = arguments.global_ranks
        options.group_name = arguments.name
        return dist.ProcessGroupNCCL(arguments.store, arguments.rank, arguments.num_ranks, options)

    def connect(self, end: Any) -> Any:
        """The device is named: torch would guess it from the rank."""
        device = torch.device("cuda", torch.cuda.current_device())
        waiting(end.eager_connect_single_device, device)
        return end

    def abort(self, end: Any) -> None:
        end.abort()


class NcclBackend:
    """A `GroupBackend` that knows every end of the generation's groups, the world's first."""

    loses_wake_ups = False
    can_be_left = True

    def __init__(
        self, engine: NcclEngine, name: str = "recorded_nccl", device_type: str = "cuda"
    ) -> None:
        self.name = name
        self.device_type = device_type
        self._engine = engine
        self._lock = threading.Lock()
        self._ends: list[Any] = []
        self._aborts: list[threading.Thread] = []
        """A thread for each end that is aborted, in the same order."""
        self._thread = 0
        """The thread that may create groups of this generation; 0 after an abort."""
        register(name, self.create, [device_type])

    def prepare(self, store: Store, num_ranks: int, timeout: timedelta) -> None:
        for name, value in SETTINGS.items():
            os.environ.setdefault(name, value)
        with self._lock:
            self._thread = threading.get_ident()
        if store.add("num_arrived", 1) == num_ranks:
            store.set("all_arrived", "")
        store.wait(["all_arrived"], timeout)

    def options(self, timeout: timedelta) -> Any:
        return self._engine.options(timeout)

    def create(self, arguments: BackendArguments, options: Any) -> Any:
        """Raises `GroupsAborted` in a thread that has been left behind, too: the groups of torch's
        tables are those of a later generation."""
        with self._lock:
            self._check(arguments)
            end = self._engine.create(arguments, options)
            self._ends.append(end)
        backend = self._engine.connect(end)
        with self._lock:
            self._check(arguments)
        return backend

    def _check(self, arguments: BackendArguments) -> None:
        if self._thread != threading.get_ident():
            raise GroupsAborted(f"group {arguments.name}: its generation has been aborted")

    def abort(self) -> None:
        """Abort all communicators at once, the world's first. One that is being aborted already is
        only waited for."""
        with self._lock:
            self._thread = 0
            for end in self._ends[len(self._aborts) :]:
                self._aborts.append(threading.Thread(target=self._engine.abort, args=(end,)))
                self._aborts[-1].daemon = True
                self._aborts[-1].start()
            aborts = list(self._aborts)
        deadline = time.monotonic() + ABORT_TIMEOUT_S
        for thread in aborts:
            thread.join(max(0.0, deadline - time.monotonic()))

    def forget(self) -> None:
        """Abort what still lives: an orderly end would wait for peers, which may have died."""
        self.abort()
        with self._lock:
            self._ends.clear()
            self._aborts.clear()
