"""The peer systems under measurement, with their best public settings."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from processes import Program, python, running

from actors.storage.line_logs import LineLog
from actors.storage.storage import DiskStorage
from pipelines.observe.history.run_folder import Tail

SCRIPTS = Path(__file__).parent / "peers"
TMPFS = Path("/dev/shm")
NUM_PORTS = 32
GLOO = {"GLOO_SOCKET_IFNAME": "lo"}


@dataclass(frozen=True)
class Peer:
    key: str
    name: str
    settings: str
    needs: str
    command: Callable[[Path], list[str]]
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def is_installed(self) -> bool:
        return find_spec(self.needs) is not None


@dataclass
class PeerRun:
    """A peer's program and the steps that it has reported."""

    program: Program
    folder: Path
    steps: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._tail = Tail(LineLog(DiskStorage(self.folder), "steps.jsonl"))

    def wait_until(self, condition: Callable[[], bool], timeout_s: float, awaited: str) -> None:
        """Read lines until the condition holds. Raises `Failed`."""

        def holds() -> bool:
            self.steps += self._tail.drain()
            return condition()

        self.program.wait_until(holds, timeout_s, awaited)

    def pid(self, world_rank: int) -> int:
        return int((self.folder / f"pid-{world_rank}").read_text())


@contextmanager
def peer_run(peer: Peer) -> Iterator[PeerRun]:
    """Run a peer, with its checkpoints on tmpfs, until the block ends."""
    with TemporaryDirectory(dir=TMPFS, prefix="peer-") as name:
        folder = Path(name)
        path = os.pathsep.join([str(SCRIPTS), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
        environment = {"PYTHONPATH": path.rstrip(os.pathsep), "TMPDIR": name}
        environment |= {**GLOO, **peer.environment}
        with running(peer.key, peer.command(folder), folder, environment) as program:
            yield PeerRun(program, folder)


def bare_loop(script: str, recipe: Path, num_workers: int) -> Peer:
    """A loop without elasticity for a run's `recipe.json`."""
    path = str(SCRIPTS / f"{script}.py")
    return Peer(
        script.replace("_", "-"),
        f"bare torchrun, {script}.py",
        "clips by the global norm, reduces the loss",
        "torch",
        lambda folder: torchrun(path, str(folder), str(recipe), num_processes=num_workers),
    )


def bare_own(num_workers: int, *arguments: str) -> Peer:
    """The loop of `bare_own.py` as a program."""
    path = str(SCRIPTS / "bare_own.py")
    return Peer(
        "bare-own",
        "bare torchrun, bare_own.py",
        "reduces the loss",
        "torch",
        lambda folder: torchrun(path, str(folder), *arguments, num_processes=num_workers),
    )


def torchrun_peace(num_workers: int, model: str, log_every: int) -> Peer:
    """The loop of `torchrun_peace.py` for a model of `peace_models.py`."""
    path = str(SCRIPTS / "torchrun_peace.py")
    return Peer(
        "torchrun",
        "torchrun DDP",
        f"one pass a step, loss reduced every {log_every} steps",
        "torch",
        lambda folder: torchrun(
            path, str(folder), model, str(log_every), num_processes=num_workers
        ),
    )


def ray_train_peace(num_workers: int, model: str, log_every: int) -> Peer:
    """The same loop under Ray Train's `TorchTrainer`."""
    words = str(num_workers), model, str(log_every)
    return Peer(
        "ray-train",
        "Ray Train",
        f"one pass a step, report every {log_every} steps, no checkpoints",
        "ray.train",
        lambda folder: python(SCRIPTS / "ray_train_peace.py", str(folder), *words),
    )


def free_ports(number: int) -> list[str]:
    """Find ports that are currently free."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(number)]
        for sock in sockets:
            sock.bind(("127.0.0.1", 0))
        return [str(sock.getsockname()[1]) for sock in sockets]


def torchrun(*arguments: str, num_processes: int = 4) -> list[str]:
    """The command of torchrun with `num_processes` on this machine."""
    agent = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*agent, "--nproc-per-node", str(num_processes), *arguments]


def _torchrun_command(folder: Path) -> list[str]:
    rules = ["--max-restarts", str(NUM_PORTS - 1), "--monitor-interval", "0.1"]
    script = [str(SCRIPTS / "torchrun_mlp.py"), str(folder), *free_ports(NUM_PORTS)]
    return torchrun(*rules, *script)


TORCHRUN = Peer(
    "torchrun",
    "torchrun",
    "restarts, monitor interval 0.1 s, checkpoint every 10 steps on tmpfs, a port per attempt",
    "torch",
    _torchrun_command,
)
RAY_TRAIN = Peer(
    "ray-train",
    "Ray Train elastic",
    "2 to 4 workers, health checks every 0.1 s, checkpoint every 10 steps on tmpfs",
    "ray.train",
    lambda folder: python(SCRIPTS / "ray_train_mlp.py", str(folder)),
    {"RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.1"},
)
TORCHFT = Peer(
    "torchft",
    "torchft",
    "lighthouse timeouts 0.1 s (join) and 0.3 s (heartbeats), no checkpoints",
    "torchft",
    lambda folder: python(SCRIPTS / "torchft_mlp.py", str(folder)),
)
PEERS = (TORCHRUN, RAY_TRAIN, TORCHFT)
