"""A Ray head started by `ray start --head` with token authentication, and jobs on it."""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from shutil import copytree, ignore_patterns
from typing import Any

from command_line import PATIENCE_S, ROOT, processes_of, ray_folder

HOST = "127.0.0.1"
BIN = Path(sys.executable).parent
INHERITED = ("RAY_ADDRESS", "RAY_TMPDIR", "RAY_API_SERVER_ADDRESS", "PYTHONPATH")
"""Variables that the machine of a test may set, but a machine of a cluster does not."""


@dataclass
class Head:
    """A cluster of one machine, and the environment of a user who has the token."""

    address: str
    folder: str
    environment: dict[str, str]

    def ray(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a `ray` command with the token."""
        return subprocess.run(
            [str(BIN / "ray"), *arguments],
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
            env=self.environment,
        )

    def submit(self, name: str, working_dir: Path | None, *command: str) -> None:
        """`ray job submit --no-wait`."""
        folder = ("--working-dir", str(working_dir)) if working_dir else ()
        ended = self.ray(
            "job", "submit", "--submission-id", name, "--no-wait", *folder, "--", *command
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr

    def details(self, name: str) -> dict[str, Any]:
        """The job server's record of a job: `status`, `message`, `driver_exit_code`."""
        code = (
            "import sys; from ray.job_submission import JobSubmissionClient as C; "
            "print(C().get_job_info(sys.argv[1]).json())"
        )
        ended = subprocess.run(
            [sys.executable, "-c", code, name],
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
            env=self.environment,
        )
        assert ended.returncode == 0, ended.stderr
        details: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
        return details

    def log(self, name: str) -> str:
        """What the command printed, without the lines with which `ray job logs` begins."""
        return self.ray("job", "logs", name).stdout.partition("Running entrypoint for job")[2]

    def await_end(self, name: str) -> dict[str, Any]:
        def is_over() -> bool:
            return self.details(name)["status"] not in ("PENDING", "RUNNING")

        wait_for(is_over, f"the end of job {name}", pause_s=1.0)
        return self.details(name)

    def await_end_of_actors(self) -> None:
        """Assert invariant 12: no run has left an actor."""
        wait_for(lambda: not self.actors(), "the end of all actors")

    def actors(self) -> list[str]:
        names = [process.name() for process in processes_of(self.folder)]
        return [name for name in names if name.startswith("ray::Ray")]


def wait_for(condition: Callable[[], object], awaited: str, pause_s: float = 0.1) -> None:
    deadline = time.monotonic() + 2 * PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"waited too long for {awaited}"
        time.sleep(pause_s)


@contextmanager
def start_head(
    num_cpus: int, autoscaling: Callable[[str], dict[str, Any]] | None = None, **environment: str
) -> Iterator[Head]:
    """Start a head; `autoscaling` returns the configuration of its autoscaler for an address.

    The head and all its processes end with the block.
    """
    with ray_folder() as folder:
        port, client_port, dashboard_port, agent_port = map(str, free_ports(4))
        inherited = {name: value for name, value in os.environ.items() if name not in INHERITED}
        head_environment = {
            **inherited,
            "RAY_TMPDIR": folder,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "PATH": f"{BIN}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),  # the installed sources
            **environment,
        }
        command = [str(BIN / "ray"), "start", "--head", "--block", "--disable-usage-stats"]
        command += ["--node-ip-address", HOST, "--port", port, "--num-cpus", str(num_cpus)]
        command += ["--ray-client-server-port", client_port, "--dashboard-port", dashboard_port]
        command += ["--dashboard-agent-listen-port", agent_port, "--temp-dir", f"{folder}/ray"]
        command += ["--min-worker-port", "0", "--max-worker-port", "0"]
        if autoscaling:
            configuration = Path(folder, "autoscaling.json")
            configuration.write_text(json.dumps(autoscaling(f"{HOST}:{port}")))
            command += ["--autoscaling-config", str(configuration)]
        log = Path(folder, "head.log")
        with log.open("w") as out:
            process = subprocess.Popen(
                command, stdout=out, stderr=subprocess.STDOUT, env=head_environment, cwd=folder
            )
        server = f"http://{HOST}:{dashboard_port}"
        head = Head(
            f"{HOST}:{port}", folder, {**head_environment, "RAY_API_SERVER_ADDRESS": server}
        )
        try:
            wait_for(lambda: has_started(process, log), "Ray's head")
            wait_for(
                lambda: has_started(process, log) and head.ray("job", "list").returncode == 0,
                "its job server",
                pause_s=1.0,
            )
            yield head
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(timeout=60.0)


def has_started(process: subprocess.Popen[bytes], log: Path) -> bool:
    """Whether `ray start --block` has reported that Ray runs."""
    assert process.poll() is None, log.read_text()
    return "Ray runtime started" in log.read_text()


def free_ports(number: int) -> list[int]:
    """Find different free ports, since all are bound at once."""
    listeners = [socket.create_server((HOST, 0)) for _ in range(number)]
    ports = [listener.getsockname()[1] for listener in listeners]
    for listener in listeners:
        listener.close()
    return ports


def copy_working_tree(folder: Path) -> Path:
    """Copy the three packages and change the copy: if an actor ran the installed sources, the run
    would be refused."""
    for package in ("elastic", "actors", "pipelines"):
        copytree(ROOT / package, folder / package, ignore=ignore_patterns("__pycache__"))
    with (folder / "elastic" / "__init__.py").open("a") as file:
        file.write("# Differs from the installed sources.\n")
    (folder / "mine.py").write_text(
        "from pipelines.run.recipes import tiny\n\n\ndef small():\n    return tiny()\n"
    )
    return folder
