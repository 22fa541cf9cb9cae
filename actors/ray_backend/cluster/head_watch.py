"""Watch of Ray's head process (the GCS), without which Ray starts and ends no actor.

Actors that know each other can still communicate: the run trains on and can be saved. After
`gcs_rpc_server_reconnect_timeout_s` Ray ends every process of the cluster.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable

KNOCK_EVERY_S = 1.0
KNOCK_TIMEOUT_S = 2.0


class HeadWatch:
    """Connects to the GCS every second, and calls `gone` once if nothing has listened there for
    `patience_s`."""

    def __init__(self, address: str, patience_s: float, gone: Callable[[], None]) -> None:
        host, _, port = address.rpartition(":")
        self._address = (host.strip("[]"), int(port))
        self._patience_s = patience_s
        self._gone = gone
        self._closed = threading.Event()
        self.is_gone = False
        threading.Thread(target=self._watch, name="head-watch", daemon=True).start()

    def close(self) -> None:
        self._closed.set()

    def _watch(self) -> None:
        heard = time.monotonic()
        while not self._closed.wait(KNOCK_EVERY_S):
            try:
                socket.create_connection(self._address, KNOCK_TIMEOUT_S).close()
                heard = time.monotonic()
            except OSError:
                if time.monotonic() - heard >= self._patience_s:
                    self.is_gone = True
                    self._gone()
                    return
