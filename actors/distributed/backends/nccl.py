"""Groups on NCCL that a death during forming cannot strand.

- Communicators do not block: `ncclCommInitRank` would, without a limit. Each is known here before
  it connects; torch would register it only afterwards.
- A generation's ranks meet at the store before the first communicator, since a wait there can be
  ended. Each group has reduced once before it is used: until then torch holds a lock that an abort
  waits for, so the thread that forms may be left behind.
- An abort ends all communicators at once. One after another, the abort of a communicator may wait
  for an operation on the device that is queued behind one of another communicator (nccl#1013).
- The survivors outlive a peer: by default torch's watchdog would end them.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed import Store

from actors.distributed.backends.torch_groups_private import (
    BackendArguments,
    as_group,
    nccl_options,
    register,
)
from actors.distributed.backends.waiting import waiting

NONBLOCKING_TIMEOUT_S = 120
"""How long torch polls a communicator that is busy: the first exchange of a reshard with a peer
waits for that peer. A thread that is about to launch a collective when its communicator is aborted
polls for this long in vain, and unwinds then."""

SETTINGS = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
    "TORCH_NCCL_NONBLOCKING_TIMEOUT": str(NONBLOCKING_TIMEOUT_S),
    "NCCL_RUNTIME_CONNECT": "0",
}
"""Set before a process' first group, where torch and NCCL read them.

The watchdog and the heartbeat monitor do not end the process: the controller decides that. The next
two: torch's watchdog otherwise sleeps 60 s after an error, while the end of its group waits for it.
The last: connections are made while groups form, not by a first collective, which would have to
wait for late ranks longer than `NONBLOCKING_TIMEOUT_S`."""

BUSY = re.compile(r"NCCL timeout in: \S*NCCLUtils")
"""torch's message where a communicator is not connected after `NONBLOCKING_TIMEOUT_S`."""

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

    def connect(self, end: Any, arguments: BackendArguments, check: Callable[[], None]) -> Any:
        """Connect an end with the other ranks; returns torch's backend. Raises RuntimeError, and
        what `check` raises, which it calls while it waits."""

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

    def connect(self, end: Any, arguments: BackendArguments, check: Callable[[], None]) -> Any:
        """The device is named: torch would guess it from the rank. Whether the communicator is
        connected shows only when it is first used."""
        device = torch.device("cuda", torch.cuda.current_device())
        waiting(end.eager_connect_single_device, device)
        group = as_group(end, "cuda", arguments)
        first = torch.zeros(1, device=device)
        while True:
            try:
                waiting(group.allreduce, [first])
                break
            except RuntimeError as error:
                check()
                if not BUSY.search(str(error)):
                    raise
        waiting(torch.cuda.current_stream(device).synchronize)
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

        def check() -> None:
            with self._lock:
                self._check(arguments)

        backend = self._engine.connect(end, arguments, check)
        check()
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
