"""A private Ray cluster on this machine, to which nodes can be added during a run."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from peer_run import free_ports
from processes import Program, running

HOST = "127.0.0.1"
START_TIMEOUT_S = 60.0
QUIET = ["--dashboard-agent-listen-port", "0", "--min-worker-port", "0", "--max-worker-port", "0"]


@dataclass
class Cluster:
    """A cluster that grows by nodes; all nodes end with the block that started the cluster."""

    folder: Path
    environment: dict[str, str]
    """The environment with which a program joins: the address and the cluster's token."""
    nodes: ExitStack
    num_nodes: int = 0

    def add_node(self, num_cpus: int) -> Program:
        """Start a node and wait until it joins."""
        return self.start(num_cpus, "--address", self.environment["RAY_ADDRESS"])

    def start(self, num_cpus: int, *arguments: str) -> Program:
        self.num_nodes += 1
        command = [str(Path(sys.executable).with_name("ray")), "start", "--block"]
        command += ["--num-cpus", str(num_cpus), "--node-ip-address", HOST, *QUIET, *arguments]
        node = running(f"node-{self.num_nodes}", command, self.folder, self.environment)
        program = self.nodes.enter_context(node)
        program.wait_until(
            lambda: "Ray runtime started" in program.tail(100), START_TIMEOUT_S, "joining"
        )
        return program


@contextmanager
def cluster(folder: Path, num_cpus: int) -> Iterator[Cluster]:
    """Start a head with `num_cpus`. Keep the path of `folder` short: Ray's sockets are below it."""
    port, client_port = free_ports(2)
    environment = {
        "RAY_ADDRESS": f"{HOST}:{port}",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
    }
    with ExitStack() as nodes:
        started = Cluster(folder, environment, nodes)
        head = ["--head", "--port", port, "--ray-client-server-port", client_port]
        head += ["--temp-dir", str(folder / "ray"), "--include-dashboard", "false"]
        started.start(num_cpus, *head)
        yield started
