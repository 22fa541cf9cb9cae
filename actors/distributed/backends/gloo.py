"""Groups on Gloo, all on one Gloo device a generation.

Torch's own `gloo` creates one device a group, and each device has a thread that wakes a hundred
times a second, even if idle.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import Store

from actors.distributed.backends.gloo_sockets import shut_gloo_connections
from actors.distributed.backends.torch_groups_private import (
    BackendArguments,
    gloo_options,
    register,
)


class GlooBackend:
    """A `GroupBackend`; `ProcessGroupGloo.abort` does nothing, so connections are shut instead."""

    name = "shared_gloo"
    device_type = "cpu"
    loses_wake_ups = True
    can_be_left = False

    def __init__(self) -> None:
        self._devices: list[Any] = []
        """The device of this generation's groups; empty until the first group."""
        register(self.name, self.create, [self.device_type])

    def prepare(self, store: Store, num_ranks: int, timeout: timedelta) -> None:
        """Nothing to do: connecting ends at the timeout, and an abort ends it sooner."""

    def options(self, timeout: timedelta) -> Any:
        if not self._devices:
            self._devices.append(_create_device(os.environ.get("GLOO_SOCKET_IFNAME", "")))
        return gloo_options(timeout, self._devices)

    def create(self, arguments: BackendArguments, options: Any) -> Any:
        options.global_ranks_in_group = arguments.global_ranks
        options.group_name = arguments.name
        return dist.ProcessGroupGloo(arguments.store, arguments.rank, arguments.num_ranks, options)

    def abort(self) -> None:
        shut_gloo_connections()

    def forget(self) -> None:
        self._devices.clear()


def _create_device(interface: str) -> Any:
    """The default device ignores the variable. If the machine's name does not resolve to a
    reachable address, it announces the loopback address to the peers."""
    if interface:
        return dist.ProcessGroupGloo.create_device(interface=interface)
    return dist.ProcessGroupGloo.create_default_device()
