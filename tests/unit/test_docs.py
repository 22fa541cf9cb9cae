"""The documents are true: what they name exists, what they list is all there is."""

from __future__ import annotations

import ast
import json
import re
import shlex
import subprocess
import sys
import textwrap
import venv
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from shutil import copyfile, copytree
from typing import get_args

import psutil
import pytest
import typer
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

from actors.ray_backend.cluster.resources import PREFIX
from actors.ray_backend.driver import exit_code
from actors.runtime.machine import sample
from actors.storage.checkpoint_files import publish
from actors.storage.storage import DiskStorage
from actors.worker.statistics_log import StatisticsLog
from elastic.protocol.commands import Command, Stopped
from elastic.protocol.events import Event
from elastic.protocol.phases import TRANSITIONS
from elastic.protocol.votes import StepRecord
from pipelines.cli import app
from pipelines.observe.history.history import History
from pipelines.observe.view.status_report import RunStatus
from pipelines.run.fault_sentences import parse_faults
from pipelines.run.plan import TrainRequest, make_plan, store_recipe
from pipelines.run.recipes import RECIPES, load
from pipelines.settings.overrides import override

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
FILES = ROOT / "docs" / "files.md"
PAGES = sorted([README, ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")])
NUM_OPTIONS = {
    "train": 19,
    "status": 4,
    "logs": 2,
    "sweep": 6,
    "reshard": 2,
    "export": 5,
    "prepare": 3,
    "plan": 2,
    "doctor": 6,
}
"""Frozen: an option more is a decision, to be made with what it is worth to whom."""

LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
CODE = re.compile(r"`([^`\n]+)`")
CODE_PATH = re.compile(
    r"(?:elastic|actors|pipelines|benchmarks|tests|docs|deploy|\.ci)/[\w./]*\w/?"
)
COMMAND_LINE = re.compile(r"^ +(?:\.venv/bin/)?(?:elastic|python -m pipelines) (.+)$", re.MULTILINE)


def section(page: Path, title: str) -> str:
    """The text under a heading, with those below it, up to the next of its level."""
    text = page.read_text()
    heading = re.search(rf"^(#+) {re.escape(title)}$", text, re.MULTILINE)
    assert heading, f"{page.name} has no section '{title}'"
    rest = text[heading.end() :]
    following = re.search(rf"^#{{1,{len(heading[1])}}} ", rest, re.MULTILINE)
    return rest[: following.start()] if following else rest


def table(page: Path, name: str) -> list[list[str]]:
    """The rows of the table below a mark, each cell as it is written."""
    _, _, below = page.read_text().partition(f"<!-- table: {name} -->\n")
    assert below, f"{page.name} has no table '{name}'"
    lines = below[: below.find("\n\n")].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def named(cell: str) -> list[str]:
    return CODE.findall(cell)


def options(command: str) -> set[str]:
    parsed = typer.main.get_command(app).commands[command]
    told = {name for option in parsed.params for name in option.opts if name.startswith("--")}
    return told - {"--help"}


def slug(heading: str) -> str:
    """The anchor that a heading gets when it is shown."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def anchors(page: Path) -> set[str]:
    return {slug(h) for h in re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)}


@pytest.mark.parametrize("script", ["make_phases.py", "make_tree.py", "make_api.py"])
def test_what_is_generated_is_up_to_date(script: str) -> None:
    """The phase diagram equals the table; the tree has each Python file and no other."""
    command = [sys.executable, str(ROOT / "docs" / script), "--check"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stderr


def test_the_diagram_shows_every_transition() -> None:
    """Read back from the page, without the script that wrote it."""
    text = (ROOT / "docs" / "phases.md").read_text()
    drawn = set(re.findall(r"^    (\w+) --> (\w+): (.+)$", text, re.MULTILINE))
    assert drawn == {
        (phase.__name__, successor.__name__, cause)
        for phase, successors in TRANSITIONS.items()
        for successor, cause in successors
    }


def test_every_python_file_has_its_line_in_the_tree() -> None:
    """Read back by indentation, without the script that wrote it."""
    told, folders = set(), []
    for line in section(README, "The tree").split("```")[1].splitlines()[1:]:
        depth = (len(line) - len(line.lstrip())) // 2
        name = line.split()[0]
        folders[depth:] = [name.rstrip("/")]
        if name.endswith(".py"):
            told.add("/".join(folders))
            assert len(line.split()) > 2, f"{name} has no description"
    packages = ("elastic", "actors", "pipelines", "benchmarks")
    found = {f.relative_to(ROOT).as_posix() for p in packages for f in (ROOT / p).rglob("*.py")}
    assert told == {name for name in found if not name.endswith("__init__.py")}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in LINK.findall(page.read_text()):
        if re.match(r"\w+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.name}: {link} leads nowhere"
        assert target.is_relative_to(ROOT), f"{page.name}: {link} leads out of the project"
        assert not anchor or anchor in anchors(target), f"{page.name}: no heading for {link}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_code_path_that_is_named_exists(page: Path) -> None:
    paths = [path for path in named(page.read_text()) if CODE_PATH.fullmatch(path)]
    missing = [path for path in paths if not (ROOT / path).exists()]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_lines_of_text_are_not_overlong(page: Path) -> None:
    """Tables, pictures, links and code may need more."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    prose = [line for line in text.splitlines() if line[:1] not in ("|", "!", " ")]
    assert max(len(LINK.sub("", line)) for line in prose) <= 110


def test_the_options_are_those_of_the_command_line() -> None:
    told = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", section(README, "Command line")))
    assert told == set().union(*map(options, NUM_OPTIONS))


@pytest.mark.parametrize("command", NUM_OPTIONS)
def test_the_number_of_options_is_frozen(command: str) -> None:
    assert len(options(command)) == NUM_OPTIONS[command], sorted(options(command))


def test_the_recipes_are_all_named() -> None:
    assert set(RECIPES) <= set(named(section(README, "Command line")))


def command_lines(page: Path) -> list[str]:
    """Those that a page shows in code, without the program's name."""
    shown = re.sub(r"\\\n\s+", "", page.read_text())
    lines = [line for line in COMMAND_LINE.findall(shown) if "OPTIONS" not in line]
    code = [line for line in shown.splitlines() if line.startswith("    ")]
    return [*lines, *(line.partition(" -- ")[2] for line in code if " -- " in line)]


def test_the_command_lines_are_accepted() -> None:
    """Parsed as typed, without being carried out."""
    command = typer.main.get_command(app)
    shown = {page: command_lines(page) for page in PAGES}
    assert all(shown[ROOT / name] for name in ("README.md", "docs/cluster.md", "docs/status.md"))
    for line in (line for lines in shown.values() for line in lines):
        words = shlex.split(re.sub(r"^(elastic|python -m pipelines) ", "", line), comments=True)
        name, *arguments = words
        command.commands[name].make_context(name, arguments)


def test_commands_within_sentences_have_the_options_that_are_told() -> None:
    told = (code for page in PAGES for code in named(page.read_text()))
    for words in (code.split() for code in told if code.startswith("elastic ")):
        known = options(words[1])
        assert {word for word in words if word.startswith("--")} <= known, words


def test_the_examples_in_python_can_be_imported() -> None:
    """Each compiles, and what it imports is there."""
    for page in PAGES:
        for code in re.findall(r"```python\n(.+?)```", page.read_text(), re.DOTALL):
            tree = ast.parse(textwrap.dedent(code), filename=page.name)
            imports = [n for n in ast.walk(tree) if isinstance(n, ast.Import | ast.ImportFrom)]
            exec(compile(ast.Module(imports, []), page.name, "exec"), {})


def test_the_faults_are_understood() -> None:
    told = section(README, "Command line").partition("Faults are sentences:")[2]
    sentences = [" ".join(s.split()) for s in re.findall(r"`([^`]+ at step \d+)`", told)]
    assert len(sentences) >= 5
    faults, draining_workers = parse_faults(sentences)
    assert len(faults) + len(draining_workers) == len(sentences) + 1, (
        "one sentence names two workers"
    )


def test_the_exit_codes_are_those_of_the_command() -> None:
    [told] = re.findall(r"Exit codes: (.+?)\n\n", section(README, "Command line"), re.DOTALL)
    codes = {
        exit_code(Stopped(outcome, 1), signal_number)
        for outcome, signal_number in (
            *(("completed", 0), ("failed", 0), ("user_error", 0)),
            *(("interrupted", 1), ("interrupted", 2), ("interrupted", 15)),
        )
    }
    assert {int(number) for number in re.findall(r"\b\d+\b", told)} == codes


def test_the_recipe_of_ones_own_works(tmp_path: Path) -> None:
    [code] = re.findall(r"```python\n(.+?)```", README.read_text(), re.DOTALL)
    (tmp_path / "mine.py").write_text(code)
    settings = override(load(f"{tmp_path / 'mine.py'}:small"), ["optimizer.lr=1e-3"])
    assert (settings.model.dim, settings.steps, settings.optimizer.lr) == (128, 400, 0.001)


@pytest.mark.parametrize(("name", "union"), [("events", Event), ("commands", Command)])
def test_journal_lines_have_the_fields_that_are_told(name: str, union: object) -> None:
    told = {named(row[0])[0]: named(row[1]) for row in table(FILES, name)}
    assert told == {kind.__name__: [f.name for f in fields(kind)] for kind in get_args(union)}


class Told:
    """As much of a replica as a line of statistics needs."""

    def statistics(self) -> dict[str, dict[str, float]]:
        return {"layers.0": {"grad_norm": 1.0}}


def written(tmp_path: Path) -> Iterator[tuple[str, list[str]]]:
    """The keys of each file that is described, as the code writes them."""
    yield "metrics", [field.name for field in fields(StepRecord)]
    yield "system", list(sample("w0", psutil.Process()))
    log = StatisticsLog(DiskStorage(tmp_path))
    log.log_step(Told(), StepRecord(0.0, 1, 1, 1, 0.0, 1, 0.0, 0.0, 0.0, False), 0)
    yield "statistics", list(json.loads((tmp_path / "statistics.jsonl").read_text()))
    published = publish(DiskStorage(tmp_path), 1, 1, ())
    yield (
        "manifest",
        list(yaml.safe_load((Path(published) / "manifest.json").read_text())),
    )
    plan = make_plan(TrainRequest("tiny", "run", str(tmp_path), data="random"), num_gpus=0)
    store_recipe(plan)
    yield "recipe", list(plan.folder.recipe() or {})
    yield "status", list(RunStatus("run", str(tmp_path), 0.0, History()).as_json())


def test_files_have_the_fields_that_are_told(tmp_path: Path) -> None:
    for name, keys in written(tmp_path):
        assert [named(row[0])[0] for row in table(FILES, name)] == keys, name


def test_each_invariant_is_quoted_where_it_is_kept() -> None:
    page = ROOT / "docs" / "invariants.md"
    rows = [line.strip("|").split("|") for line in page.read_text().splitlines() if "| `" in line]
    assert [int(row[0]) for row in rows] == list(range(1, 13))
    for row in rows:
        files = [ROOT / name for name in named(row[2]) + named(row[3])]
        quoted = re.compile(rf"[Ii]nvariants?[\d ,and]* {int(row[0])}\b")
        assert any(quoted.search(file.read_text()) for file in files), row


def test_the_cluster_is_valid() -> None:
    """By the schema and the checks of the installed Ray."""
    cluster = yaml.safe_load((ROOT / "cluster.yaml").read_text())
    validate_config(prepare_config(cluster))
    for local in cluster["file_mounts"].values():
        assert local.startswith("~") or (ROOT / local).exists(), local
    pinned = (ROOT / "constraints.txt").read_text()
    for image in ("head_image", "worker_image"):
        version = re.search(r"ray:([\d.]+)-", cluster["docker"][image])[1]
        assert f"ray=={version}\n" in pinned, "the image's Ray is another than the pinned one"


def test_spot_comes_before_on_demand() -> None:
    """For each type of GPU the same machine twice; the head is on demand and takes no worker."""
    cluster = yaml.safe_load((ROOT / "cluster.yaml").read_text())
    types = cluster["available_node_types"]
    head = types.pop(cluster["head_node_type"])
    assert "InstanceMarketOptions" not in head["node_config"] and head["resources"] == {"CPU": 0}
    spot = {name: told for name, told in types.items() if name.endswith("-spot")}
    assert len(spot) == 2 and len(types) == 4
    for name, told in spot.items():
        on_demand = types[name.removesuffix("-spot")]
        assert told["node_config"].pop("InstanceMarketOptions") == {"MarketType": "spot"}
        assert told.pop("priority") > on_demand.pop("priority")
        assert told == on_demand
        [accelerator] = [key for key in told["resources"] if key.startswith(PREFIX)]
        assert f"{accelerator.removeprefix(PREFIX)}" in (ROOT / "docs" / "cluster.md").read_text()


@pytest.mark.slow
def test_the_cluster_installs_what_it_copies(tmp_path: Path) -> None:
    """The setup command as it stands, in a new virtual environment; what the project depends on is
    not fetched, but lent from here."""
    cluster = yaml.safe_load((ROOT / "cluster.yaml").read_text())
    home = tmp_path / "home"
    for remote, local in cluster["file_mounts"].items():
        if remote.startswith("~/elastic-training/"):
            target = home / remote.removeprefix("~/")
            target.parent.mkdir(parents=True, exist_ok=True)
            copy = copytree if (ROOT / local).is_dir() else copyfile
            copy(ROOT / local, target)
    venv.create(tmp_path / "venv", with_pip=True)
    lent = str(Path(yaml.__file__).parents[1])
    [installed] = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    (installed / "dependencies.pth").write_text(f"{lent}\n")
    environment = {
        "HOME": str(home),
        "PATH": f"{tmp_path / 'venv' / 'bin'}:/usr/bin:/bin",
        "PIP_NO_INDEX": "1",
        "PIP_NO_DEPS": "1",
        "PIP_NO_BUILD_ISOLATION": "0",  # so pip spells "no isolation"
    }
    [command] = cluster["setup_commands"]
    with_setuptools = {**environment, "PYTHONPATH": lent}  # what the build asks for
    subprocess.run(["bash", "-c", command], env=with_setuptools, check=True, timeout=300)
    script = tmp_path / "venv" / "bin" / "elastic"
    told = subprocess.run(
        [str(script), "--help"],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert "train" in told.stdout
    where = subprocess.run(
        [str(script.with_name("python")), "-c", "import elastic; print(elastic.__file__)"],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert where.stdout.strip() == str(home / "elastic-training" / "elastic" / "__init__.py")
