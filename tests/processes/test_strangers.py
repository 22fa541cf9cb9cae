"""Strangers: processes without the run's secret read no snapshot and stop no run."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from harness import run_in_processes
from test_snapshot_server import HOST, SECRET, Child, assert_has, interrupt_never

from test_snapshot_server import ASSIGNMENT, SPECS, random_shard, snapshots_at  # isort: skip
from test_snapshots import SETTINGS, kill

from actors.runtime.authenticated_server import AuthenticatedServer
from actors.runtime.handshake import Unauthenticated, connect_local, connect_remote, new_secret
from actors.snapshots.memory_layout import most_bytes
from actors.snapshots.messages import receive_message, send_message
from actors.snapshots.server import SnapshotServerProcess
from elastic.protocol.events import (
    Event,
    StateReady,
    StepCommitted,
    StoreReady,
    WorkerLost,
    WorkerReady,
)
from elastic.protocol.snapshot_events import SnapshotServerReady
from elastic.reshard.snapshot_placement import SnapshotServer

STRANGER = str(Path(__file__).with_name("stranger.py"))
NUM_DESCRIPTORS = 64
UNPRIVILEGED_USER = 65534
PATIENCE_S = 60.0
ROOT = Path(__file__).parents[2]


def command(attack: str, snapshot_server: SnapshotServer) -> list[str]:
    return [
        sys.executable,
        STRANGER,
        attack,
        snapshot_server.socket,
        snapshot_server.host,
        str(snapshot_server.port),
    ]


@contextmanager
def run_stranger(attack: str, snapshot_server: SnapshotServer) -> Iterator[None]:
    """A stranger's process that performs `attack` from before the block begins until it ends."""
    process = subprocess.Popen(command(attack, snapshot_server), stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for _ in range(2):
        assert process.stdout.readline(), f"{attack}: the stranger has ended"
    reader = threading.Thread(target=process.stdout.read, daemon=True)
    reader.start()
    try:
        yield
        assert process.poll() is None, f"{attack}: the stranger has ended"
    finally:
        process.kill()
        process.wait()
        reader.join()
        process.stdout.close()


@pytest.fixture
def child() -> Iterator[Child]:
    started = Child("here")
    yield started
    started.end()


def take_and_read(child: Child, steps: range) -> None:
    """Take snapshots, and read them in place and over the network."""
    snapshots = snapshots_at(child.snapshot_server)
    for step in steps:
        deadline = time.monotonic() + PATIENCE_S
        snapshots.begin(step, ASSIGNMENT, random_shard(step))
        snapshots.await_whole(interrupt_never)
        while not snapshots.are_whole:  # a busy machine may take longer than a vote waits
            assert time.monotonic() < deadline
            snapshots.begin(step, ASSIGNMENT, random_shard(step))
            snapshots.await_whole(interrupt_never)
        snapshots.note_vote(1, 1)
        for reader in ("here", "elsewhere"):
            assert_has(child.snapshot_server, step, reader)
    snapshots.end_generation()


@pytest.mark.parametrize("attack", ["read", "replay"])
def test_stranger_reads_no_snapshot(child: Child, attack: str) -> None:
    take_and_read(child, range(1, 2))
    completed = subprocess.run(
        command(attack, child.snapshot_server), capture_output=True, text=True, timeout=60
    )
    answers = [json.loads(line) for line in completed.stdout.splitlines()]
    assert len(answers) >= 2, completed.stderr
    assert all([0, 0] in answer.values() for answer in answers), answers
    take_and_read(child, range(2, 3))


@pytest.mark.parametrize("attack", ["harm", "flood"])
def test_stranger_disturbs_no_snapshots(child: Child, attack: str) -> None:
    """The server has few descriptors, so a flood of connections exhausts them."""
    assert child.process.pid
    resource.prlimit(child.process.pid, resource.RLIMIT_NOFILE, (NUM_DESCRIPTORS, NUM_DESCRIPTORS))
    take_and_read(child, range(1, 2))
    with run_stranger(attack, child.snapshot_server):
        take_and_read(child, range(2, 5))
    take_and_read(child, range(5, 6))
    memory = Path(f"/proc/{child.process.pid}/status").read_text()
    [peak_kb] = [int(line.split()[1]) for line in memory.splitlines() if line.startswith("VmHWM")]
    assert peak_kb < 2**21, "the server allocated memory that a stranger requested"


@pytest.mark.slow
def test_run_recovers_from_snapshots_despite_strangers(tmp_path: Path) -> None:
    """The killed worker was the only holder of its shard."""
    strangers: list[subprocess.Popen[bytes]] = []
    are_alive: list[bool] = []

    def on_event(event: Event) -> None:
        if isinstance(event, SnapshotServerReady):
            for attack in ("harm", "flood"):
                started = subprocess.Popen(
                    command(attack, event.snapshot_server), stdout=subprocess.DEVNULL
                )
                strangers.append(started)
        if isinstance(event, WorkerLost):
            are_alive.extend(process.poll() is None for process in strangers)

    try:
        run = run_in_processes(
            tmp_path,
            SETTINGS,
            2,
            layout="fsdp=2",
            snapshot_every=1,
            fleet_faults=[kill("w1")],
            on_event=on_event,
        )
    finally:
        for process in strangers:
            process.kill()
            process.wait()
    assert are_alive and all(are_alive), "the strangers ended before the recovery"
    assert run.stopped.outcome == "completed", run.story()
    assert "snapshot" in [line["source"] for line in run.lines_of("Resharded")], run.story()


STORE_ATTACKS = ("store garbage", "store flood", "store overwrite")


@pytest.mark.slow
def test_run_recovers_while_strangers_attack_its_store(tmp_path: Path) -> None:
    """The attacks continue while groups form without the killed worker."""
    strangers: list[subprocess.Popen[str]] = []
    readers: list[threading.Thread] = []
    are_alive: list[bool] = []

    killed_in: list[int] = []
    pids: dict[str, int] = {}

    def start_attacks(store: StoreReady) -> None:
        for attack in STORE_ATTACKS:
            arguments = [sys.executable, STRANGER, attack, "", store.host, str(store.port)]
            strangers.append(subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True))
        for process in strangers:
            assert process.stdout and process.stdout.readline(), (
                f"{process.args}: the stranger has ended"
            )
            readers.append(threading.Thread(target=process.stdout.read, daemon=True))
            readers[-1].start()

    def on_event(event: Event) -> None:
        match event:
            case StoreReady():
                start_attacks(event)
            case WorkerReady():
                pids[event.worker] = event.pid
            case StepCommitted() if event.record.world_size == 3 and "w1" in pids:
                killed_in.append(event.generation)
                os.kill(pids.pop("w1"), signal.SIGKILL)
            case StateReady() if killed_in and event.generation > killed_in[0] and not are_alive:
                are_alive.extend(process.poll() is None for process in strangers)

    try:
        run = run_in_processes(
            tmp_path, SETTINGS, 3, layout="dp=3", on_event=on_event, timeout_s=300.0
        )
    finally:
        for process in strangers:
            process.kill()
            process.wait()
        for reader in readers:
            reader.join()
        for process in strangers:
            if process.stdout:
                process.stdout.close()
    assert run.stopped.outcome == "completed", run.story()
    assert len(are_alive) == 3 and all(are_alive), "the strangers ended before the recovery"
    assert len(run.lines_of("WorkerLost")) == 1, run.story()
    generations = [line["generation"] for line in run.lines_of("Resume")]
    assert generations == list(range(1, len(generations) + 1)), (
        "each generation that formed also ran"
    )


def test_other_secret_is_refused_on_both_sockets(child: Child) -> None:
    snapshot_server, other_secret = child.snapshot_server, new_secret()
    with pytest.raises(Unauthenticated):
        connect_local(snapshot_server.socket, other_secret, 5.0)
    with pytest.raises(Unauthenticated):
        connect_remote((snapshot_server.host, snapshot_server.port), other_secret, 5.0)


def test_impostor_on_a_servers_port_receives_nothing() -> None:
    """An impostor answers the handshake with random bytes; nothing further is sent to it."""
    with socket.create_server((HOST, 0)) as impostor:
        address = impostor.getsockname()
        received: list[bytes] = []

        def answer() -> None:
            connection, _ = impostor.accept()
            connection.recv(52, socket.MSG_WAITALL)
            connection.sendall(os.urandom(64))
            received.append(connection.recv(1000))

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(Unauthenticated):
            connect_remote((address[0], address[1]), SECRET, 5.0)
        thread.join()
        assert received == [b""]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")
def test_other_user_is_refused_despite_the_secret(child: Child) -> None:
    script = (
        "import os, sys\n"
        "from actors.runtime.handshake import connect_local\n"
        f"os.setresuid({UNPRIVILEGED_USER}, {UNPRIVILEGED_USER}, {UNPRIVILEGED_USER})\n"
        "try:\n"
        "    connect_local(sys.argv[1], bytes.fromhex(sys.argv[2]), 5.0)\n"
        "except OSError as error:\n"
        "    print(type(error).__name__)\n"
    )
    arguments = [sys.executable, "-c", script, child.snapshot_server.socket, SECRET.hex()]
    done = subprocess.run(arguments, capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.strip() == "Unauthenticated", done.stderr


def test_server_refuses_other_users_processes() -> None:
    """The client here does not check the server's user itself."""
    if os.geteuid() != 0:
        pytest.skip("only root may become another user")
    server = SnapshotServerProcess("n0", "", HOST, SECRET)
    script = (
        "import os, socket, sys\n"
        f"os.setresuid({UNPRIVILEGED_USER}, {UNPRIVILEGED_USER}, {UNPRIVILEGED_USER})\n"
        "sock = socket.socket(socket.AF_UNIX)\n"
        "sock.connect(chr(0) + sys.argv[1])\n"
        "try:\n"
        "    sock.sendall(b'elastic-snapshots-1\\n' + bytes(32))\n"
        "    print(len(sock.recv(64)))\n"
        "except OSError as error:\n"
        "    print(0)\n"
    )
    arguments = [sys.executable, "-c", script, server.snapshot_server.socket]
    done = subprocess.run(arguments, capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.strip() == "0", done.stderr


def test_requests_with_the_secret_are_bounded() -> None:
    """The size of the whole state is the limit. A malformed message ends only its connection."""
    max_bytes = most_bytes(SPECS)
    server = SnapshotServerProcess("n0", "", HOST, SECRET, max_snapshot_bytes=max_bytes)
    header = {"worker": "w0", "generation": 3}
    requests = [
        {"do": "room", **header, "num_bytes": max_bytes + 1},
        {"do": "room", **header, "num_bytes": -1},
        {"do": "put", **header, "step": 1, "kept_step": -2, "num_bytes": 2**60},
        {
            "do": "fold", **header, "step": 1, "kept_step": -2, "num_bytes": 5,
            "members": ["w0", "w1", "w2"], "at": "w1", "parity_bytes": 2**60,
        },
        {"do": "nothing"},
        {"do": "get", "worker": ["w0"], "generation": 3, "step": 1},
        {},
    ]  # fmt: skip
    address = (server.snapshot_server.host, server.snapshot_server.port)
    for request in requests:
        with connect_remote(address, SECRET, 5.0) as peer:
            send_message(peer, **request)
            assert receive_message(peer) is None, request
    for body in (b"\xff\xff\xff\xff", b"\0\0\0\2[]", b"\0\0\0\1x"):
        with connect_remote(address, SECRET, 5.0) as peer:
            peer.sendall(body)
            assert receive_message(peer) is None, body
    assert server.report(3).memory_bytes == 0
    with connect_local(server.snapshot_server.socket, SECRET, 5.0) as peer:
        send_message(peer, do="room", **header, num_bytes=max_bytes)
        assert socket.recv_fds(peer, 1, 2)[1]


def test_server_accepts_again_once_it_has_descriptors(child: Child) -> None:
    """The server has no pending connection that it could drop."""
    pid = child.process.pid
    assert pid
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (1, before[1]))
    with socket.socket(socket.AF_UNIX) as waiting:
        waiting.connect("\0" + child.snapshot_server.socket)
        time.sleep(0.5)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
        connect_local(child.snapshot_server.socket, SECRET, 5.0).close()
    take_and_read(child, range(1, 2))


def fill_queue(listener: socket.socket) -> list[socket.socket]:
    """Unaccepted connections, until the kernel refuses more."""
    waiting: list[socket.socket] = []
    while True:
        sock = socket.socket(socket.AF_UNIX)
        sock.setblocking(False)
        waiting.append(sock)
        try:
            sock.connect(listener.getsockname())
        except BlockingIOError:
            return waiting


def local_listener(kind: type[socket.socket] = socket.socket) -> socket.socket:
    listener = kind(socket.AF_UNIX)
    listener.bind(f"\0elastic-test-listener-{os.getpid()}-{time.monotonic_ns()}")
    listener.listen(2)
    return listener


def test_connection_is_retried_while_the_queue_is_full() -> None:
    listener = local_listener()
    waiting = fill_queue(listener)
    connected: list[object] = []

    def connect() -> None:
        try:
            connected.append(connect_local(listener.getsockname()[1:].decode(), SECRET, 5.0))
        except OSError as error:
            connected.append(error)

    connecting = threading.Thread(target=connect)
    connecting.start()
    time.sleep(0.3)
    served = threading.Event()
    AuthenticatedServer([listener], SECRET, lambda connection: served.set())
    connecting.join()
    assert served.wait(20.0), connected
    [sock] = connected
    assert isinstance(sock, socket.socket)
    for connection in (sock, *waiting):
        connection.close()


class Exhausted(socket.socket):
    """Accepting the first connections raises `MemoryError`."""

    num_left = 3

    def accept(self) -> tuple[socket.socket, object]:
        if self.num_left:
            self.num_left -= 1
            raise MemoryError
        return super().accept()


def test_server_without_memory_keeps_accepting_and_logs_once(
    capfd: pytest.CaptureFixture[str],
) -> None:
    listener = local_listener(Exhausted)
    AuthenticatedServer([listener], SECRET, lambda connection: send_message(connection, heard=True))
    with connect_local(listener.getsockname()[1:].decode(), SECRET, 5.0) as sock:
        assert receive_message(sock) == {"heard": True}
    assert capfd.readouterr().err.count("the server keeps accepting after") == 1
