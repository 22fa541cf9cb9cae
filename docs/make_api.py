"""Writes `api.md`: what the packages' doors give out, with signatures and docstrings.

python docs/make_api.py            writes it
python docs/make_api.py --check    exits with 1 if the page is out of date
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

from generated import ROOT, keep

PACKAGES = ("pipelines", "actors", "elastic")
BESIDE = (ROOT / "actors" / "runtime" / "program.py",)
"""Modules that have a door of their own: their package imports nothing."""
LONGEST = 92
Definition = ast.ClassDef | ast.FunctionDef


def api() -> str:
    """Every package that has a door, from the outermost in."""
    doors = [door for package in PACKAGES for door in sorted((ROOT / package).rglob("__init__.py"))]
    doors = [
        each for door in doors for each in (door, *(b for b in BESIDE if b.parent == door.parent))
    ]
    return "\n\n".join(part for door in doors for part in _package(door))


def _package(door: Path) -> Iterator[str]:
    tree = ast.parse(door.read_text())
    names = _names(tree)
    if names:
        yield f"## {_dotted(door)}"
        yield _docstring(tree)
    for name in names:
        file, definition = _found(door, name)
        yield f"### {_dotted(door)}.{name}"
        yield f"From [{file.relative_to(ROOT)}](../{file.relative_to(ROOT)})."
        yield "\n".join(["```python", *_signature(definition), "```"])
        yield _docstring(definition)


def _names(tree: ast.Module) -> list[str]:
    """What `__all__` lists."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return [str(name) for name in ast.literal_eval(node.value)]
    return []


def _found(file: Path, name: str) -> tuple[Path, Definition | ast.Assign]:
    """Where a name is defined, through whatever doors it is handed on."""
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, Definition) and node.name == name:
            return file, node
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            return file, node
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    return _found(_file_of(str(node.module)), alias.name)
    sys.exit(f"{file.relative_to(ROOT)}: {name} is not defined there")


def _file_of(module: str) -> Path:
    path = ROOT / module.replace(".", "/")
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def _dotted(door: Path) -> str:
    module = door.parent if door.name == "__init__.py" else door.with_suffix("")
    return module.relative_to(ROOT).as_posix().replace("/", ".")


def _signature(node: Definition | ast.Assign) -> Iterator[str]:
    if isinstance(node, ast.Assign):
        yield ast.unparse(node)
        return
    if isinstance(node, ast.FunctionDef):
        yield from _function(node)
        return
    yield f"class {node.name}{_bases(node)}:"
    lines = [line for member in node.body for line in _member(member)]
    yield from (f"    {line}" for line in lines or ["..."])


def _bases(node: ast.ClassDef) -> str:
    told = ", ".join(ast.unparse(base) for base in node.bases)
    return f"({told})" if told else ""


def _member(node: ast.stmt) -> Iterator[str]:
    """The fields, what is said below them, and methods that are for others, and `__init__`."""
    if isinstance(node, ast.AnnAssign) and not ast.unparse(node.target).startswith("_"):
        yield ast.unparse(node)
    if isinstance(node, ast.FunctionDef) and (node.name[0] != "_" or node.name == "__init__"):
        decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
        if not any("validator" in decorator for decorator in decorators):
            yield from (f"@{decorator}" for decorator in decorators)
            yield from _function(node, with_docstring=True)


def _function(node: ast.FunctionDef, with_docstring: bool = False) -> Iterator[str]:
    told = ast.get_docstring(node) if with_docstring else None
    end = "" if told else " ..."
    returned = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    line = f"def {node.name}({ast.unparse(node.args)}){returned}:{end}"
    if len(line) <= LONGEST:
        yield line
    else:
        yield f"def {node.name}("
        yield from (f"    {one}," for one in _arguments(node.args))
        yield f"){returned}:{end}"
    if told:
        yield from (f"    {line}" for line in f'"""{told}"""'.splitlines())


def _arguments(arguments: ast.arguments) -> Iterator[str]:
    """One by one, with their defaults, as they are written."""
    plain = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(plain) - len(arguments.defaults)) + list(arguments.defaults)
    for argument, default in zip(plain, defaults, strict=True):
        yield _argument(argument, default)
    if arguments.vararg or arguments.kwonlyargs:
        yield f"*{ast.unparse(arguments.vararg)}" if arguments.vararg else "*"
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        yield _argument(argument, default)
    if arguments.kwarg:
        yield f"**{ast.unparse(arguments.kwarg)}"


def _argument(argument: ast.arg, default: ast.expr | None) -> str:
    told = ast.unparse(argument)
    if default is None:
        return told
    return f"{told} = {ast.unparse(default)}" if argument.annotation else f"{told}={default}"


def _docstring(node: ast.Module | Definition | ast.Assign) -> str:
    return "" if isinstance(node, ast.Assign) else ast.get_docstring(node) or ""


if __name__ == "__main__":
    keep(ROOT / "docs" / "api.md", {"api": api()})
