"""The store: a TCPStore in its own process, so that it outlives any worker."""

from __future__ import annotations

import os
import signal
from multiprocessing.connection import Connection

from torch.distributed import TCPStore

from actors.runtime.network import ANYWHERE, Network, listen


def open_store(host: str, network: Network = ANYWHERE) -> TCPStore:
    """Open a store on a free port of `host`; by itself, torch would listen on all addresses.

    Raises `UnsuitableMachine` if no port is free.
    """
    listener = listen(host, network)
    port = listener.getsockname()[1]
    return TCPStore(
        host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )


def host_store(pipe: Connection, host: str, network: Network = ANYWHERE) -> None:
    """A child process's main function: send the port, then serve until the parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    store = open_store(host, network)
    pipe.send(store.port)
    try:
        pipe.recv()
    except EOFError:
        os._exit(0)
