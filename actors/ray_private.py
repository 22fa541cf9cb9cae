"""The only file that touches Ray's private names; each use says why there is no public way."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import ray._private.worker as driver
from ray._private import state
from ray._private.authentication.authentication_token_setup import (
    maybe_enable_token_auth_if_token_available,
)
from ray.core.generated import autoscaler_pb2

ON_HEAD = {"node:__internal_head__": 0.001}
"""The resources of what belongs on the head: it is not taken back, and its end is the cluster's.
Ray puts an actor without resources on any machine; a soft affinity to a node is not always kept
(seen), and a hard one would not survive a new head. There is no public name for the head."""


def hush_driver() -> None:
    """Keep Ray from printing a paragraph for each worker that dies.

    Such deaths are this project's daily bread and stand in its own display; the switch for
    workers' logs (`log_to_driver`) leaves these messages on.
    """
    driver._worker_logs_enabled = False


def take_token() -> None:
    """Show this machine's token, if there is one, to a cluster that is joined by its address.

    A new local cluster wants one, but `ray.init` shows it only where it has found the cluster by
    itself; RAY_AUTH_MODE would have to be set before Ray is imported.
    """
    logging.getLogger("ray").setLevel(logging.ERROR)  # it would tell how to do without
    maybe_enable_token_auth_if_token_available(warn_if_disabled=False)


def end_log_monitor() -> None:
    """End the process that forwards workers' output to a driver, in a cluster of our own.

    With `log_to_driver` off nobody reads what it forwards, but it goes on looking for new files
    ten times a second, a hundredth of a core; only `ray start` has a public switch for it.
    """
    driver._global_node.kill_log_monitor(check_alive=False)


def draining_nodes() -> dict[str, float]:
    """By node the announced end, in seconds since the epoch, or 0 for none; the public state API
    tells only of the dead. Raises RayError."""
    told = state.state.get_draining_nodes()
    return {node: deadline_ms / 1000 for node, deadline_ms in told.items()}


def node_of_actor(actor: Any) -> str:
    """The id of the node where it runs or last ran; empty if it never did. The public state API
    needs the dashboard, which a local cluster has not. Raises RayError."""
    told = state.state.actor_table(actor._actor_id.hex())
    return str(told.get("Address", {}).get("NodeID", "") or "")


def drain_node(node: str, cause: str, deadline: float) -> None:
    """Have Ray place nothing on a node any more, and the autoscaler replace it; whatever runs there
    runs on. The command `ray drain-node` does the same, and nothing public does. Raises RayError.
    """
    reason = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
    driver.global_worker.gcs_client.drain_node(node, reason, cause, int(deadline * 1000))


def job_folder() -> Path | None:
    """The folder into which Ray has unpacked the working directory of the submitted job that this
    process runs in, or None. Ray deletes it with the job, and tells nobody."""
    here = Path.cwd()
    return here if "working_dir_files" in here.parts else None
