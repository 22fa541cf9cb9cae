"""The documentation names only what exists, and its lists are complete."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import get_args

import psutil
import pytest
import typer
import yaml
from doc_pages import blocks
from rich.console import Console

from actors.ray_backend.driver import exit_code
from actors.runtime.fault_spec import MOMENTS
from actors.runtime.machine import sample
from actors.storage.checkpoint_files import publish
from actors.storage.storage import DiskStorage
from actors.worker.statistics_log import StatisticsLog
from elastic.protocol.commands import Command, Stopped
from elastic.protocol.events import Event
from elastic.protocol.votes import StepRecord
from pipelines.cli import app
from pipelines.observe.history.history import History
from pipelines.observe.view.status_report import RunStatus
from pipelines.run.fault_sentences import parse_faults
from pipelines.run.in_process import train_in_process
from pipelines.run.plan import TrainRequest, make_plan, store_recipe
from pipelines.run.recipes import RECIPES, load
from pipelines.settings.overrides import override

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
README = ROOT / "README.md"
BENCHMARKS = ROOT / "benchmarks" / "README.md"
COMMAND_LINE = DOCS / "command-line.md"
SETTINGS = DOCS / "settings.md"
FILES = DOCS / "files.md"
TOP_PAGES = [README, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
PAGES = sorted([*TOP_PAGES, *DOCS.glob("*.md")])
MAX_README_LINES = 150
NUM_OPTIONS = {
    "train": 20,
    "status": 4,
    "logs": 2,
    "sweep": 6,
    "reshard": 2,
    "export": 5,
    "prepare": 3,
    "convert": 2,
    "plan": 15,
    "simulate": 18,
    "doctor": 6,
}
"""Frozen: a new option is a decision that states its value and its users."""

LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
CODE = re.compile(r"`([^`\n]+)`")
CODE_PATH = re.compile(
    r"(?:elastic|actors|pipelines|benchmarks|tests|docs|deploy|\.ci)/[\w./]*\w/?"
)
SHOWN_COMMAND = re.compile(
    r"^ +(?:\.venv/bin/)?(?:elastic|python -m pipelines) (.+)$", re.MULTILINE
)


def read_section(page: Path, title: str) -> str:
    """The text under a heading, with its subsections, up to the next heading of its level."""
    text = page.read_text()
    heading = re.search(rf"^(#+) {re.escape(title)}$", text, re.MULTILINE)
    assert heading, f"{page.name} has no section '{title}'"
    following_text = text[heading.end() :]
    following = re.search(rf"^#{{1,{len(heading[1])}}} ", following_text, re.MULTILINE)
    return following_text[: following.start()] if following else following_text


def read_table(page: Path, name: str) -> list[list[str]]:
    """The rows of the table below a marker, each cell verbatim."""
    _, _, below = page.read_text().partition(f"<!-- table: {name} -->\n")
    assert below, f"{page.name} has no table '{name}'"
    lines = below[: below.find("\n\n")].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def code_spans(cell: str) -> list[str]:
    return CODE.findall(cell)


def options_of(command: str) -> set[str]:
    parsed = typer.main.get_command(app).commands[command]
    names = {name for option in parsed.params for name in option.opts if name.startswith("--")}
    return names - {"--help"}


def slug(heading: str) -> str:
    """The anchor of a heading, on the site and on GitHub."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def anchors(page: Path) -> set[str]:
    return {slug(h) for h in re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)}


def test_readme_has_at_most_150_lines() -> None:
    assert len(README.read_text().splitlines()) <= MAX_README_LINES


@pytest.mark.parametrize("page", sorted(set(PAGES) - set(TOP_PAGES)), ids=lambda page: page.name)
def test_page_begins_with_its_use_and_a_block(page: Path) -> None:
    """What the reader can do after reading; a command or code in the first 15 lines."""
    head, *_ = page.read_text().split("\n## ")
    assert re.search(r"^After this page you (can|know) ", head, re.MULTILINE), page.name
    first = next(blocks(page), None)
    assert first and first.line <= 15, page.name


def test_recovery_times_of_the_readme_are_those_of_the_benchmark() -> None:
    measured = read_section(BENCHMARKS, "recovery")
    medians = re.findall(r"^\| [^|]+ \| ([\d.]+) \| [\d.]+ [\d. ]+ \|", measured, re.MULTILINE)
    table_of_peers = read_section(README, "How it compares").partition("\n\n**")[0]
    shown_times = re.findall(r"(\d+\.\d+) s", table_of_peers)
    assert sorted(map(float, shown_times)) == sorted(float(f"{float(m):.3g}") for m in medians)
    first_sentence = README.read_text().split("**")[1]
    assert set(re.findall(r"(\d+\.\d+) s", first_sentence)) <= set(shown_times)


def test_documentation_index_lists_each_page_once() -> None:
    """These links are the navigation of the site."""
    links = re.findall(r"^\| \[[^\]]*\]\(([^)]+)\)", (DOCS / "README.md").read_text(), re.MULTILINE)
    listed_pages = [(DOCS / link).resolve() for link in links]
    assert len(listed_pages) == len(set(listed_pages))
    assert set(listed_pages) == {*PAGES, BENCHMARKS} - {DOCS / "README.md"}


def test_glossary_has_each_term_once() -> None:
    terms = re.findall(r"^\| (.+?) \|", (DOCS / "glossary.md").read_text(), re.MULTILINE)
    terms = [term for term in terms if term != "term"]
    assert len(terms) > 60 and len(terms) == len(set(terms))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_have_existing_targets(page: Path) -> None:
    for link in LINK.findall(page.read_text()):
        if re.match(r"\w+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.name}: {link} has no target"
        assert target.is_relative_to(ROOT), f"{page.name}: {link} points out of the project"
        assert not anchor or anchor in anchors(target), f"{page.name}: no heading for {link}"


@pytest.mark.parametrize("page", sorted(DOCS.glob("*.md")), ids=lambda page: page.name)
def test_no_page_is_a_dead_end(page: Path) -> None:
    """It leads to another page, and a page other than the index leads to it."""
    links = {p: {link.partition("#")[0] for link in LINK.findall(p.read_text())} for p in PAGES}
    pages = {p.name for p in DOCS.glob("*.md")} - {page.name, "README.md"}
    assert links[page] & pages, page.name
    leading = [p for p in PAGES if p != page and {page.name, f"docs/{page.name}"} & links[p]]
    assert page.name == "README.md" or set(leading) - {DOCS / "README.md"}, page.name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_named_code_path_exists(page: Path) -> None:
    paths = [path for path in code_spans(page.read_text()) if CODE_PATH.fullmatch(path)]
    missing = [path for path in paths if not (ROOT / path).exists()]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_lines_of_prose_have_at_most_110_characters(page: Path) -> None:
    """Tables, pictures, links and code may be longer."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    prose = [line for line in text.splitlines() if line[:1] not in ("|", "!", " ")]
    assert max(len(LINK.sub("", line)) for line in prose) <= 110


def test_documented_options_are_those_of_the_command_line() -> None:
    text, _, _ = COMMAND_LINE.read_text().partition("## Where files go")
    listed_options = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", text))
    assert listed_options == set().union(*map(options_of, NUM_OPTIONS))


def test_each_option_is_listed_with_its_command() -> None:
    """Options of commands other than `train` follow in rows below the command's name."""
    listed_options: dict[str, set[str]] = {name: {"--storage"} for name in NUM_OPTIONS}
    rows = read_section(COMMAND_LINE, "Options of `train`")
    listed_options["train"] |= set(
        re.findall(r"--[a-z][a-z-]+", "".join(re.findall(r"^\| `.+?\|", rows, re.M)))
    )
    command = ""
    for row in re.findall(
        r"^\|.+\|$", read_section(COMMAND_LINE, "Options of the other commands"), re.M
    ):
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        command = code_spans(cells[0])[0] if code_spans(cells[0]) else command
        if command:
            listed_options[command] |= set(re.findall(r"--[a-z][a-z-]+", cells[1]))
    without_storage = {name: options_of(name) | {"--storage"} for name in NUM_OPTIONS}
    assert listed_options == without_storage


def test_all_commands_are_listed() -> None:
    listed_commands = re.findall(
        r"^\| `(\w+)", read_section(COMMAND_LINE, "Commands"), re.MULTILINE
    )
    on_first_screen = re.findall(
        r"^    elastic (\w+) .+#", read_section(README, "Command line"), re.MULTILINE
    )
    assert sorted(listed_commands) == sorted(on_first_screen) == sorted(NUM_OPTIONS)


@pytest.mark.parametrize("command", NUM_OPTIONS)
def test_number_of_options_is_frozen(command: str) -> None:
    assert len(options_of(command)) == NUM_OPTIONS[command], sorted(options_of(command))


def test_all_recipes_are_named() -> None:
    assert set(RECIPES) <= set(code_spans(read_section(COMMAND_LINE, "Recipes")))


def command_lines(page: Path) -> list[str]:
    """The command lines in the code blocks of a page, without the name of the program."""
    text = re.sub(r"\\\n\s+", "", page.read_text())
    lines = [line for line in SHOWN_COMMAND.findall(text) if "OPTIONS" not in line]
    code = [line for line in text.splitlines() if line.startswith("    ")]
    return [*lines, *(line.partition(" -- ")[2] for line in code if " -- " in line)]


def test_documented_command_lines_are_valid() -> None:
    """The parser accepts each line; no command runs."""
    command = typer.main.get_command(app)
    lines_by_page = {page: command_lines(page) for page in PAGES}
    assert all(
        lines_by_page[ROOT / name]
        for name in ("README.md", "docs/cluster.md", "docs/status.md", "docs/command-line.md")
    )
    for line in (line for lines in lines_by_page.values() for line in lines):
        words = shlex.split(re.sub(r"^(elastic|python -m pipelines) ", "", line), comments=True)
        name, *arguments = words
        command.commands[name].make_context(name, arguments)


def test_commands_within_sentences_have_known_options() -> None:
    pages = [page for page in PAGES if page.name != "CHANGELOG.md"]
    inline = (code for page in pages for code in code_spans(page.read_text()))
    for code in (code for code in inline if code.startswith("elastic ")):
        words = code.partition(" -- ")[0].split()  # behind the dashes are those of a script
        known_options = options_of(words[1])
        assert {word for word in words if word.startswith("--")} <= known_options, words


def test_documented_faults_are_parsed() -> None:
    sentences = re.findall(
        r"^\| `([^`]+ at step \d+)`", read_section(COMMAND_LINE, "Faults"), re.MULTILINE
    )
    assert {sentence.split()[0] for sentence in sentences} == {
        *("kill", "stop", "hang", "raise", "remove", "flip", "nan", "slow")
    }
    faults, draining_workers = parse_faults(sentences)
    assert len(faults) + len(draining_workers) == len(sentences) + 1, (
        "exactly one sentence names two workers"
    )


def test_all_moments_of_faults_are_listed() -> None:
    _, _, moments = read_section(COMMAND_LINE, "Faults").partition("| moment |")
    rows = [line for line in moments.splitlines() if line.startswith("| `")]
    listed_moments = [moment for row in rows for moment in code_spans(row.split("|")[1])]
    faults, _ = parse_faults(f"kill worker 1 in {moment} at step 3" for moment in listed_moments)
    assert sorted(fault.moment for fault in faults) == sorted(MOMENTS)


def test_documented_exit_codes_are_those_of_the_command() -> None:
    rows = re.findall(r"^\| ([\d, ]+) \|", read_section(COMMAND_LINE, "Exit codes"), re.MULTILINE)
    codes = {
        exit_code(Stopped(outcome, 1), signal_number)
        for outcome, signal_number in (
            *(("completed", 0), ("failed", 0), ("user_error", 0)),
            *(("interrupted", 1), ("interrupted", 2), ("interrupted", 15)),
        )
    }
    assert {int(number) for row in rows for number in row.split(",")} == codes


def python_example_of(page: Path) -> str:
    [code] = re.findall(r"```python[^\n]*\n(.+?)```", page.read_text(), re.DOTALL)
    return code


def test_documented_transformer_recipe_can_be_loaded(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(python_example_of(COMMAND_LINE))
    settings = override(load(f"{tmp_path / 'mine.py'}:small"), ["optimizer.lr=1e-3"])
    assert (settings.model.dim, settings.steps, settings.optimizer.lr) == (128, 400, 0.001)


@pytest.mark.slow
def test_custom_model_of_the_readme_trains(tmp_path: Path) -> None:
    """It trains in this process, with only the number of steps changed."""
    recipe = tmp_path / "digits.py"
    recipe.write_text(python_example_of(README))
    request = TrainRequest(f"{recipe}:recipe", "run", str(tmp_path), "1", steps=60)
    assert train_in_process(request, Console(quiet=True)) == 0
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    losses = [json.loads(line)["loss"] for line in lines]
    assert len(losses) == 60
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.parametrize(("name", "union"), [("events", Event), ("commands", Command)])
def test_journal_lines_have_the_listed_fields(name: str, union: object) -> None:
    listed_fields = {code_spans(row[0])[0]: code_spans(row[1]) for row in read_table(FILES, name)}
    assert listed_fields == {
        kind.__name__: [f.name for f in fields(kind)] for kind in get_args(union)
    }


class ReplicaStatistics:
    """The method of a replica that a line of statistics needs."""

    def statistics(self) -> dict[str, dict[str, float]]:
        return {"layers.0": {"grad_norm": 1.0}}


def written_keys(tmp_path: Path) -> Iterator[tuple[str, list[str]]]:
    """The keys that the code writes to each described file."""
    yield "metrics", [field.name for field in fields(StepRecord)]
    yield "system", list(sample("w0", psutil.Process(), 0.0))
    log = StatisticsLog(DiskStorage(tmp_path))
    log.log_step(ReplicaStatistics(), StepRecord(0.0, 1, 1, 1, 0.0, 1, 0.0, 0.0, 0.0, False), 0)
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


def test_files_have_the_listed_fields(tmp_path: Path) -> None:
    for name, keys in written_keys(tmp_path):
        assert [code_spans(row[0])[0] for row in read_table(FILES, name)] == keys, name


def test_each_invariant_is_quoted_in_its_code_or_tests() -> None:
    page = DOCS / "invariants.md"
    rows = [line.strip("|").split("|") for line in page.read_text().splitlines() if "| `" in line]
    assert [int(row[0]) for row in rows] == list(range(1, 13))
    for row in rows:
        files = [ROOT / name for name in code_spans(row[2]) + code_spans(row[3])]
        quoted = re.compile(rf"[Ii]nvariants?[\d ,and]* {int(row[0])}\b")
        assert any(quoted.search(file.read_text()) for file in files), row
