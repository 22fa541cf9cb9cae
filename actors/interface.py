"""The network interface that groups talk over: the one that has this node's address."""

from __future__ import annotations

import os

import psutil
import ray

VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def choose_interface() -> None:
    """Name the interface to Gloo and NCCL, unless the user has named one.

    Without it Gloo resolves the host's name, which takes 0.6 s or fails (FACTS: process groups).
    """
    address = ray.util.get_node_ip_address()
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in addresses):
            for variable in VARIABLES:
                os.environ.setdefault(variable, name)
