"""The command lines of README.md and docs/*.md that need workers, and the Python blocks that start
Ray, as written: on the shared cluster, in a folder with the files that the page names.

A run that would take long is interrupted once its last injected fault has happened, or else after
two steps: it must save and end.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from command_line import ROOT, Command, read_lines
from doc_folder import make_folder
from doc_not_run import reason
from doc_pages import COMMANDS, PYTHON_PAGES, as_script, needs_ray
from doc_pages import Command as Shown
from shared_cluster import SharedCluster, make_tracking_store

pytestmark = pytest.mark.timeout(900)
QUICK = ("reshard",)
"""`make ci` runs the first command line with each; `make soak` runs all."""

INTERRUPTED = 130
FEW_STEPS = 2
SHOWN = [command for command in COMMANDS if command.needs_workers and not reason(command)]


def marks(command: Shown) -> list[pytest.MarkDecorator]:
    first = {next(other.place for other in SHOWN if word in other.words) for word in QUICK}
    return [pytest.mark.slow if command.place in first else pytest.mark.soak]


@pytest.fixture(scope="module")
def prepared_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`runs/data` of all folders: the corpus of `byte_lm` is prepared once."""
    return tmp_path_factory.mktemp("data")


@pytest.fixture
def folder(tmp_path: Path, prepared_data: Path) -> Path:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "data").symlink_to(prepared_data)
    make_tracking_store(tmp_path / "runs")
    return tmp_path


@contextmanager
def started(
    cluster: SharedCluster, folder: Path, *words: str, **environment: str
) -> Iterator[Command]:
    """A process in the folder, with the cluster's address; killed at the end if it still runs."""
    process = subprocess.Popen(
        [sys.executable, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "RAY_ADDRESS": cluster.address,
            "RAY_TMPDIR": cluster.folder,
            **environment,
        },
        cwd=folder,
        start_new_session=True,
    )
    try:
        yield Command(process, folder / "runs", cluster.folder, cluster.address)
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def committed(folder: Path) -> int:
    """The newest committed step of the folder's only run."""
    steps = [len(read_lines(file)) for file in (folder / "runs").glob("*/metrics.jsonl")]
    return max(steps, default=0)


def last_fault(command: Shown) -> int:
    return max(map(int, re.findall(r"at step (\d+)", command.text)), default=0)


def interrupt(command: Command) -> None:
    """SIGINT, unless the run has ended by itself; it must have saved, or completed."""
    if command.process.poll() is None:
        command.process.send_signal(signal.SIGINT)
    code, output = command.finish()
    assert code in (0, INTERRUPTED), output


@pytest.mark.parametrize(
    "shown", [pytest.param(command, id=command.place, marks=marks(command)) for command in SHOWN]
)
def test_the_command_line_trains(
    shown: Shown, folder: Path, shared_ray_cluster: SharedCluster
) -> None:
    make_folder(folder, shown.page)
    words = ("-m", "pipelines", *(shown.arguments or ()))
    if "reshard" in words:
        assert_reshards(words, folder, shared_ray_cluster)
        return
    with started(shared_ray_cluster, folder, *words, **shown.environment) as command:
        if "sweep" in words:
            code, output = command.finish()
            assert code == 0 and "tokens/s" in output, output
            return
        enough = max(FEW_STEPS, last_fault(shown) + 1)
        command.wait_until(
            lambda: committed(folder) >= enough or command.process.poll() == 0, f"step {enough}"
        )
        interrupt(command)
    assert committed(folder) >= enough


def assert_reshards(words: tuple[str, ...], folder: Path, cluster: SharedCluster) -> None:
    """Beside a run of the name that the command line has."""
    train = ("train", "tiny", "--data", "random", "--steps", "100000", "--workers", "4")
    with started(cluster, folder, "-m", "pipelines", *train, "--run-name", "demo") as run:
        run.wait_until(lambda: committed(folder) >= FEW_STEPS, "two steps")
        with started(cluster, folder, *words) as command:
            code, output = command.finish()
        interrupt(run)
    assert code == 0, output
    assert words[-1] in output and "moved" in output, output


@pytest.mark.soak
@pytest.mark.parametrize(
    "page", [page for page in PYTHON_PAGES if needs_ray(page)], ids=lambda page: page.name
)
def test_the_python_blocks_that_start_ray_run(
    page: Path, folder: Path, shared_ray_cluster: SharedCluster
) -> None:
    """In order, in one namespace; a traceback has the lines of the page."""
    make_folder(folder, page)
    (folder / "blocks.py").write_text(as_script(page))
    token = str(Path.home() / ".ray" / "auth_token")
    with started(
        shared_ray_cluster, folder, "blocks.py", HOME=str(folder), RAY_AUTH_TOKEN_PATH=token
    ) as command:
        code, output = command.finish()
    assert code == 0, output
    assert committed(folder)
