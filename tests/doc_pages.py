"""The code blocks of README.md and docs/*.md: Python blocks and command lines, with their lines.

An indented block holds command lines. A fenced block names its language: `python` is executed, and
`text` is output or a drawing. `title="digits.py"` after the language says that the block is a file.
"""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SHELL = ("", "sh", "shell", "bash", "console")
OURS = (("elastic",), (".venv/bin/elastic",), ("python", "-m", "pipelines"))
ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")
TITLE = re.compile(r'title="([^"]+)"')


@dataclass(frozen=True)
class Block:
    """A code block; `line` is the number of its first line of code."""

    page: Path
    line: int
    language: str
    title: str
    code: str

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


@dataclass(frozen=True)
class Command:
    """A command line as typed, joined where it continues on the next line."""

    page: Path
    line: int
    text: str

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def environment(self) -> dict[str, str]:
        """The assignments before the command."""
        words = shlex.split(self.text, comments=True)
        before = words[: len(words) - len(self.words)]
        return dict(word.split("=", 1) for word in before)

    @property
    def words(self) -> list[str]:
        """The command and its arguments, without assignments and comments."""
        words = shlex.split(self.text, comments=True)
        while words and ASSIGNMENT.match(words[0]):
            del words[0]
        return words

    @property
    def arguments(self) -> list[str] | None:
        """The arguments of `elastic`; None if it is another program."""
        for program in OURS:
            if tuple(self.words[: len(program)]) == program:
                return self.words[len(program) :]
        return None

    @property
    def needs_workers(self) -> bool:
        """Whether it trains, or asks for a run that trains."""
        name, *options = self.arguments or [""]
        return name in ("sweep", "reshard") or (name == "train" and "--dry-run" not in options)


def blocks(page: Path) -> Iterator[Block]:
    """All code blocks of a page, in order."""
    for token in MarkdownIt("commonmark").parse(page.read_text()):
        if token.map and token.type in ("fence", "code_block"):
            first = token.map[0] + (2 if token.type == "fence" else 1)
            language, _, attributes = token.info.strip().partition(" ")
            title = TITLE.search(attributes)
            yield Block(page, first, language, title[1] if title else "", token.content)


def python_blocks(page: Path) -> list[Block]:
    return [block for block in blocks(page) if block.language == "python"]


def needs_ray(page: Path) -> bool:
    """Whether the Python blocks of a page start workers on Ray: by `fit()` or `start()`."""
    nodes = (node for block in python_blocks(page) for node in ast.walk(ast.parse(block.code)))
    calls = (node.func for node in nodes if isinstance(node, ast.Call))
    called = {function.attr for function in calls if isinstance(function, ast.Attribute)}
    return bool(called & {"fit", "start"})


def as_script(page: Path) -> str:
    """The page's Python blocks in one file, each line where it is in the page."""
    lines: list[str] = []
    for block in python_blocks(page):
        lines += [""] * (block.line - 1 - len(lines)) + block.code.splitlines()
    return "\n".join(lines) + "\n"


def commands(page: Path) -> list[Command]:
    """The command lines of a page, in order."""
    found = []
    for block in blocks(page):
        if block.language in SHELL:
            number = block.line
            for text in re.sub(r"\\\n[ \t]+", "\0", block.code).splitlines():
                if text.strip() and not text.lstrip().startswith("#"):
                    found.append(Command(page, number, text.replace("\0", "").strip()))
                number += 1 + text.count("\0")
    return found


PYTHON_PAGES = [page for page in PAGES if python_blocks(page)]
COMMANDS = [command for page in PAGES for command in commands(page)]
