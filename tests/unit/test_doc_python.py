"""Each Python block of README.md and docs/*.md runs as it is written, in a folder with its files.

Pages whose blocks start workers of Ray run in `tests/ray/test_documented_runs.py`.
"""

from __future__ import annotations

import ast
import os
import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from doc_folder import make_folder
from doc_pages import PAGES, PYTHON_PAGES, as_script, blocks, needs_ray, python_blocks
from rich.console import Console

from pipelines.cli import main
from pipelines.run.in_process import train_in_process
from pipelines.run.plan import TrainRequest

pytestmark = pytest.mark.slow

LANGUAGES = {
    "": "command lines",
    "json": "an example of a line of a file",
    "mermaid": "a diagram",
    "python": "executed",
    "text": "output, or a drawing",
    "yaml": "a part of a file for Kubernetes",
    "{eval-rst}": "a directive of Sphinx",
    "{source-tree}": "a directive of Sphinx",
}
"""The languages of code blocks, and what their blocks are. Only `python` is executed here."""


def train(recipe: str, name: str, *changes: str, steps: int = 2, data: str | None = None) -> None:
    request = TrainRequest(recipe, name, "runs", steps=steps, data=data, changes=changes)
    assert train_in_process(request, Console(quiet=True)) == 0


def export(run: str) -> None:
    sys.argv = ["elastic", "export", run]
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code


def train_custom_model() -> None:
    train("examples/custom_model.py:recipe", "demo")


def export_transformer() -> None:
    train("tiny", "demo", data="texts/**/*.txt")
    export("demo")


def export_adapters() -> None:
    small = ("data.seq_len=128", "batch=8", "eval_every=0")
    model = "init_from=models/qwen3-0.6b"
    train("finetune", "tuned", model, "lora.rank=8", *small, data="chats.jsonl")
    export("tuned")


BEFORE: dict[str, Callable[[], None]] = {
    "custom-model.md": train_custom_model,
    "export.md": export_transformer,
    "finetune.md": export_adapters,
}
"""What the reader of a page has run before its Python blocks: a run, or its export."""


def pages() -> list[object]:
    plain = [page for page in PYTHON_PAGES if not needs_ray(page)]
    trains = [page for page in plain if page.name in BEFORE or "in_process" in as_script(page)]
    return [
        pytest.param(page, marks=[pytest.mark.slow] if page in trains else [], id=page.name)
        for page in plain
    ]


@pytest.fixture
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(os.environ, "HF_HUB_OFFLINE", "1")
    return tmp_path


@pytest.mark.parametrize("page", pages())
def test_the_python_blocks_of_the_page_run(page: Path, in_folder: Path) -> None:
    """In order, in one namespace; a traceback has the lines of the page."""
    make_folder(in_folder, page)
    if page.name in BEFORE:
        BEFORE[page.name]()
    script = in_folder / f"{page.stem}.py"
    script.write_text(as_script(page))
    names = runpy.run_path(str(script), run_name="__main__")
    defined = {
        node.name
        for block in python_blocks(page)
        for node in ast.parse(block.code).body
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
    }
    assert defined <= names.keys()


def test_each_page_with_preparations_has_python_blocks() -> None:
    assert BEFORE.keys() <= {page.name for page in PYTHON_PAGES if not needs_ray(page)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_each_code_block_has_a_known_language(page: Path) -> None:
    unknown = [block.place for block in blocks(page) if block.language not in LANGUAGES]
    assert not unknown


def test_no_python_hides_in_a_block_of_text() -> None:
    texts = [block for page in PAGES for block in blocks(page) if block.language == "text"]
    statement = re.compile(r"^\s*(import \w|from [\w.]+ import |def \w+\(|class \w+[(:])", re.M)
    assert texts and not [block.place for block in texts if statement.search(block.code)]


def test_a_new_block_is_found(tmp_path: Path) -> None:
    """Fenced, indented, in a list, and with a title."""
    page = tmp_path / "page.md"
    page.write_text(
        "# A\n\n    elastic plan \\\n      --model-params 7e9  # why\n\n"
        '```python title="a.py"\nx = 1\n'
        "```\n\n1. Do\n\n       elastic doctor\n\n   ```python\n   y = x\n   ```\n"
    )
    assert [block.language for block in blocks(page)] == ["", "python", "", "python"]
    assert [block.title for block in python_blocks(page)] == ["a.py", ""]
    assert as_script(page).splitlines()[6] == "x = 1"
    assert as_script(page).splitlines()[14] == "y = x"
