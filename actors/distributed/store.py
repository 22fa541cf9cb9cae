"""The store: a TCPStore in a process of its own, so that it outlives any worker."""

from __future__ import annotations

import os
import signal
from multiprocessing.connection import Connection

from torch.distributed import TCPStore

from actors.runtime.network import ANYWHERE, Network, listen


def open_store(host: str, network: Network = ANYWHERE) -> TCPStore:
    """Listen on a free port of `host`, which torch by itself would do on all addresses.

    Raises `UnfitMachine` if there is none.
    """
    listener = listen(host, network)
    port = listener.getsockname()[1]
    return TCPStore(
        host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )


def host_store(pipe: Connection, host: str, network: Network = ANYWHERE) -> None:
    """A child's main: tell the port, then serve until the parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    store = open_store(host, network)
    pipe.send(store.port)
    try:
        pipe.recv()
    except EOFError:
        os._exit(0)
