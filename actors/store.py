"""The store: a TCPStore in a process of its own, so that it outlives any worker."""

from __future__ import annotations

import os
import signal
import socket
from multiprocessing.connection import Connection

from torch.distributed import TCPStore


def open_store(host: str) -> TCPStore:
    """Listen on a free port of `host`, which torch by itself would do on all addresses."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, 0), family=family)
    port = listener.getsockname()[1]
    return TCPStore(
        host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )


def host_store(pipe: Connection, host: str) -> None:
    """A child's main: tell the port, then serve until the parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    store = open_store(host)
    pipe.send(store.port)
    try:
        pipe.recv()
    except EOFError:
        os._exit(0)
