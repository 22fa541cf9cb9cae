"""The pages that programs write are up to date."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from elastic.protocol.phases import TRANSITIONS
from pipelines.settings.setting import entries_of
from pipelines.settings.settings import RESUMABLE_SETTINGS, TrainSettings

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
SETTINGS = DOCS / "settings.md"


def run_script(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(DOCS / name), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_generated_parts_of_phases_md_are_up_to_date() -> None:
    finished = run_script("make_phases.py", "--check")
    assert finished.returncode == 0, finished.stderr


def test_tables_of_settings_page_are_up_to_date() -> None:
    ended = run_script("make_settings.py", "--check")
    assert ended.returncode == 0, ended.stderr


def test_tables_of_architectures_page_are_what_the_code_refuses() -> None:
    ended = run_script("make_architectures.py", "--check")
    assert ended.returncode == 0, ended.stderr


def test_board_is_what_the_benchmarks_have_written() -> None:
    ended = run_script("../benchmarks/board.py", "--check")
    assert ended.returncode == 0, ended.stderr


def test_every_setting_has_a_description_on_its_page() -> None:
    """The test parses the page itself, without the script that wrote it."""
    row = re.compile(r"^\| `([\w.]+)` \| [^|]+ \| (yes|no) \| (.+) \|$", re.MULTILINE)
    rows = row.findall(SETTINGS.read_text())
    assert all(text.endswith(".") for _, _, text in rows)
    assert {name for name, _, _ in rows} == {entry.name for entry in entries_of(TrainSettings)}
    assert {name for name, answer, _ in rows if answer == "yes"} == RESUMABLE_SETTINGS


def test_phase_diagram_shows_every_transition() -> None:
    """The test parses the page itself, without the script that wrote it."""
    text = (DOCS / "phases.md").read_text()
    drawn_transitions = set(re.findall(r"^    (\w+) --> (\w+): (.+)$", text, re.MULTILINE))
    assert drawn_transitions == {
        (phase.__name__, successor.__name__, cause)
        for phase, successors in TRANSITIONS.items()
        for successor, cause in successors
    }


def test_tree_describes_every_python_file() -> None:
    """The test reads the folders back from the indentation of the printed tree."""
    described_files, folders = set(), []
    for line in run_script("make_tree.py").stdout.splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        name = line.split()[0]
        folders[depth:] = [name.rstrip("/")]
        if name.endswith(".py"):
            described_files.add("/".join(folders))
            assert len(line.split()) > 2, f"{name} has no description"
    packages = ("elastic", "actors", "pipelines", "benchmarks")
    existing_files = {
        f.relative_to(ROOT).as_posix() for p in packages for f in (ROOT / p).rglob("*.py")
    }
    assert described_files == {name for name in existing_files if not name.endswith("__init__.py")}
