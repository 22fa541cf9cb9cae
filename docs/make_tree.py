"""Prints the tree of source files: one line a file, from the first sentence of its docstring.

python docs/make_tree.py            prints it; docs/tree.md shows it on the site
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("elastic", "actors", "pipelines", "benchmarks")
WIDTH = 22
FOLDERS = {
    "benchmarks": "Programs that measure; results in benchmarks/README.md",
    "benchmarks/peers": "The programs of the other systems that are measured",
    "tests/golden": "Scenarios as text, each with its expected trace",
    "tests/gpu": "The same on a GPU; skipped without one",
    "tests/processes": "Real training in plain processes: kills, reshards, checkpoints, tracking",
    "tests/properties": "Laws that hold for all inputs that Hypothesis draws",
    "tests/ray": "The `elastic` command on a real Ray, with real signals",
    "tests/sim": "The real core in a simulated world of crashes, hangs and lost messages",
    "tests/unit": "Single parts, by example",
}
"""Descriptions of folders that are no packages."""
LOOSE = {
    "docs/": "Pages of the documentation, and the programs that generate parts of them",
    "cluster.yaml": "A Ray cluster on AWS: see docs/cluster.md",
    "deploy/": "The image, a RayJob for Kubernetes, alerts for Prometheus, a dashboard for Grafana",
}


def tree() -> str:
    lines = [line for package in PACKAGES for line in _files(ROOT / package, indent=0)]
    tests = sorted(folder for folder in (ROOT / "tests").iterdir() if any(folder.glob("*.*")))
    lines.append("tests/")
    lines += [_line(f"{f.name}/", _description(f), 1) for f in tests if f.name != "__pycache__"]
    lines += [_line(name, description, 0) for name, description in LOOSE.items()]
    return "\n".join(lines)


def _files(folder: Path, indent: int) -> Iterator[str]:
    """The folder's own line, then its Python files, then the folders in it."""
    yield _line(f"{folder.name}/", _description(folder), indent)
    for file in sorted(folder.glob("*.py")):
        if file.name != "__init__.py":
            yield _line(file.name, first_sentence(file), indent + 1)
    for inner in sorted(folder.iterdir()):
        if any(inner.glob("*.py")):
            yield from _files(inner, indent + 1)


def _description(folder: Path) -> str:
    name = folder.relative_to(ROOT).as_posix()
    if name in FOLDERS:
        return FOLDERS[name]
    if not (folder / "__init__.py").exists():
        sys.exit(f"{name}/ has no line in FOLDERS of docs/make_tree.py")
    return first_sentence(folder / "__init__.py")


def first_sentence(file: Path) -> str:
    """The first sentence of a file's docstring, without its full stop."""
    docstring = ast.get_docstring(ast.parse(file.read_text()))
    if not docstring:
        sys.exit(f"{file.relative_to(ROOT)} has no docstring")
    paragraph = " ".join(docstring.split("\n\n")[0].split())
    return re.split(r"\.(?=\s|$)", paragraph)[0]


def _line(name: str, description: str, indent: int) -> str:
    return f"{'  ' * indent}{name}".ljust(WIDTH) + f" {description}"


if __name__ == "__main__":
    print(tree())
