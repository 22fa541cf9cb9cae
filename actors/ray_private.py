"""The only file that touches Ray's private names; each use says why there is no public way."""

from __future__ import annotations

import ray._private.worker as driver


def hush_driver() -> None:
    """Keep Ray from printing a paragraph for each worker that dies.

    Such deaths are this project's daily bread and stand in its own display; the switch for
    workers' logs (`log_to_driver`) leaves these messages on.
    """
    driver._worker_logs_enabled = False
