"""Ray's private names, used in this file only; each use says why there is no public way."""

from __future__ import annotations

import logging
import os
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from secrets import token_hex
from typing import Any

import ray._private.worker as driver
from ray._private import ray_constants, services, state, utils
from ray._private.authentication.authentication_token_setup import (
    AuthenticationTokenLoader,
    _get_default_token_path,
    maybe_enable_token_auth_if_token_available,
)
from ray._private.node import Node
from ray.core.generated import autoscaler_pb2

from actors.ray_backend.cluster.sessions import Guard

ON_HEAD = {"node:__internal_head__": 0.001}
"""The resources of actors that belong on the head, which is not released and ends with the cluster.
Ray puts an actor without resources on any machine. A soft affinity to a node is not always kept
(seen), and a hard one would not survive a new head. There is no public name for the head."""


def silence_driver_logs() -> None:
    """Keep Ray from printing a paragraph for each worker that dies.

    Such deaths are normal in an elastic run, and its own display shows them. The switch for
    workers' logs (`log_to_driver`) leaves these messages on.
    """
    driver._worker_logs_enabled = False


def recorded_address() -> str | None:
    """The address of the cluster that the last `ray start` on this machine recorded, or None.

    `ray.init(address="auto")` also joins any cluster whose processes it finds on this machine, for
    example the private cluster of another command; no public option restricts it to this file.

    Every user may replace files in Ray's folder, so the file counts only if it belongs to this user
    or root: a process exchanges pickles with the cluster that it joins.
    """
    with suppress(OSError):  # there is no such file, or it is a link
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
        with open(os.open(utils.get_ray_address_file(None), flags)) as file:
            if os.fstat(file.fileno()).st_uid in (0, os.geteuid()):
                return file.read().strip() or None
    return None


def make_token() -> None:
    """Create this user's token file if there is none.

    `ray.init` creates it, too, but two commands that start at once overwrite each other's token,
    and other users may read the file.
    """
    mode = os.environ.get("RAY_AUTH_MODE", "token")
    if mode.lower() != "token" or AuthenticationTokenLoader.instance().has_token(
        ignore_auth_mode=True
    ):
        return
    path = _get_default_token_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}-{token_hex(8)}")
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(token_hex(32))
    with suppress(FileExistsError):  # another command was faster
        path.hardlink_to(draft)
    draft.unlink()
    AuthenticationTokenLoader.instance().reset_cache()


SYSTEM_CONFIG = {"gcs_rpc_server_reconnect_timeout_s": 300}
"""By default Ray ends every process that has not reached the GCS for 60 s, even while it saves."""


@contextmanager
def private_processes(guard: Guard) -> Iterator[None]:
    """Make Ray's processes that start inside the block private to this process.

    Each leads its own session and blocks SIGTERM and SIGHUP, and so do its children. So a signal to
    this process's group, or to its whole cgroup, stops only this process, which then saves the run
    and ends them. If this process is killed, the kernel kills them (PR_SET_PDEATHSIG, by Ray), and
    the guard kills their children. Ray has no option for any of this.
    """
    is_noted = False
    before = services.ConsolePopen

    class PrivateProcess(before):  # type: ignore[misc, valid-type]
        def __init__(
            self, command: list[str], preexec_fn: Callable[[], None] | None = None, **options: Any
        ) -> None:
            def prepare() -> None:
                if preexec_fn is not None:
                    preexec_fn()
                signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGHUP))

            nonlocal is_noted
            folder = re.search(rf"/[^=]*?/session_[0-9_-]+_{os.getpid()}(?=/|$)", " ".join(command))
            if folder and not is_noted:
                is_noted = True
                guard.note_session(Path(folder[0]))
            super().__init__(command, preexec_fn=prepare, start_new_session=True, **options)
            guard.note_process(self.pid)

        def terminate(self) -> None:
            """Kill the process, since it blocks SIGTERM."""
            self.kill()

    services.ConsolePopen = PrivateProcess
    try:
        yield
    finally:
        services.ConsolePopen = before


def take_token() -> None:
    """Use this machine's token, if there is one, for a cluster that is joined by its address.

    A new local cluster requires a token, but `ray.init` sends it only to a cluster that it found by
    itself. RAY_AUTH_MODE would have to be set before Ray is imported.
    """
    logging.getLogger("ray").setLevel(logging.ERROR)  # else it logs how to do without a token
    maybe_enable_token_auth_if_token_available(warn_if_disabled=False)


AGENT_NEEDS = (
    "aiohttp",
    "aiohttp_cors",
    "grpc",
    "opencensus",
    "opentelemetry.exporter.prometheus",
    "opentelemetry.proto",
    "prometheus_client",
)
"""What Ray imports in this process to find out whether its agents can import it."""


NOWHERE = b"127.0.0.1:9"
"""The port of the discard service, which no machine offers any more."""


@contextmanager
def without_unused_services() -> Iterator[None]:
    """Start none of the services that a private cluster does not need, and import nothing for them.

    Of these, `ray.init` can leave out only the dashboard's pages, not its server, for which it
    waits 2 s. The log monitor forwards workers' output to a driver, where nothing reads it; the
    monitor starts machines. The imports take 1 s.
    """
    replaced: list[tuple[Any, str, Callable[..., None]]] = [
        (Node, "start_api_server", _announce_no_server),
        (Node, "start_monitor", _do_nothing),
        (Node, "start_log_monitor", _do_nothing),
    ]
    if all(map(_is_installed, AGENT_NEEDS)):
        replaced.append((utils, "get_dashboard_dependency_error", _do_nothing))
    replaced = [entry for entry in replaced if hasattr(entry[0], entry[1])]  # versions differ
    before = [getattr(owner, name) for owner, name, _ in replaced]
    for owner, name, replacement in replaced:
        setattr(owner, name, replacement)
    try:
        yield
    finally:
        for (owner, name, _), original in zip(replaced, before, strict=True):
            setattr(owner, name, original)


def _is_installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # its parent is missing
        return False


def _announce_no_server(node: Node, **options: object) -> None:
    """Give an address at which nothing listens as that of the dashboard's server.

    Without one, the agent of each node looks for it every second, and logs 20 lines each time. In
    this process the server has no address, as Ray leaves it for one without pages.
    """
    node._webui_url = ""
    address, space = ray_constants.DASHBOARD_ADDRESS, ray_constants.KV_NAMESPACE_DASHBOARD
    node.get_gcs_client().internal_kv_put(address.encode(), NOWHERE, True, space)


def _do_nothing(*arguments: object, **options: object) -> None:
    pass


def draining_nodes() -> dict[str, float]:
    """The deadline of each draining node, in seconds since the epoch, or 0 if it has none. The
    public state API reports only dead nodes. Raises RayError."""
    deadlines_ms = state.state.get_draining_nodes()
    return {node: deadline_ms / 1000 for node, deadline_ms in deadlines_ms.items()}


def node_of_actor(actor: Any) -> str:
    """The id of the node where an actor runs or last ran; empty if it never ran. The public state
    API needs the dashboard, which a local cluster lacks. Raises RayError."""
    row = state.state.actor_table(actor._actor_id.hex())
    return str(row.get("Address", {}).get("NodeID", "") or "")


def drain_node(node: str, cause: str, deadline: float) -> None:
    """Drain a node: Ray places nothing on it any more, the autoscaler replaces it, and its actors
    run on. The command `ray drain-node` does the same; there is no public API. Raises RayError.
    """
    reason = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
    driver.global_worker.gcs_client.drain_node(node, reason, cause, int(deadline * 1000))


def job_folder() -> Path | None:
    """The folder into which Ray unpacked the working directory of this process's submitted job, or
    None. Ray deletes it with the job, without a warning."""
    here = Path.cwd()
    return here if "working_dir_files" in here.parts else None
