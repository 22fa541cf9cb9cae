"""A user's file, run in each process as `python FILE` runs it, with what it imports beside it."""

from __future__ import annotations

import atexit
import importlib
import importlib.util
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from inspect import isfunction
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle

from pipelines.errors import UserError
from pipelines.settings.user_code import is_users, user_code_errors


def file_and_function(name: str) -> tuple[str, str]:
    """Of `FILE.py:FUNCTION`, `MODULE:FUNCTION`, or `FILE.py`, whose function is empty; of another
    name both are."""
    if name.endswith(".py"):
        return name, ""
    place, _, function = name.rpartition(":")
    return place, function


@dataclass(frozen=True)
class ScriptFile:
    """A function of a file, or the file itself, to be sent to workers in its place.

    So whatever the file does when it is run, such as settings of torch and patches, has its effect
    on each worker, and its objects need not be picklable.
    """

    path: str
    function: str
    """Empty: the file as a whole is the script."""
    sources: Mapping[str, str]
    """The texts of the file and of what it has imported from its folder, by relative path."""
    argv: tuple[str, ...]
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the function, by name."""

    @classmethod
    def of(cls, recipe: object, arguments: Mapping[str, Any]) -> ScriptFile | None:
        """The file of `FILE.py:FUNCTION` or `FILE.py`, or of a function of the program that runs;
        else None."""
        if isinstance(recipe, str):
            place, function = file_and_function(recipe)
            if not place.endswith(".py"):
                return None
            path, argv = Path(place).resolve(), _arguments_of(place)
        else:
            main = sys.modules["__main__"]
            if main.__spec__ is not None:  # `python -m`: it may import relatively
                return None
            file = getattr(main, "__file__", None)
            function = getattr(recipe, "__qualname__", "")
            if not isfunction(recipe) or file is None or getattr(main, function, None) != recipe:
                return None
            path, argv = Path(file).resolve(), sys.argv
        if not is_users(str(path)):
            return None
        return cls(str(path), function, _sources_beside(path), tuple(argv), arguments)

    @property
    def place(self) -> str:
        """`FILE.py:FUNCTION` or `FILE.py` on this machine; the files are written if it does not
        have them."""
        folder = Path(self.path).parent
        if any(_text_of(folder / name) != text for name, text in self.sources.items()):
            folder = Path(tempfile.mkdtemp(prefix="elastic-script-"))
            atexit.register(shutil.rmtree, folder, ignore_errors=True)
            for name, text in self.sources.items():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_text(text)
        file = str(folder / Path(self.path).name)
        return f"{file}:{self.function}" if self.function else file


def shipped(kwargs: dict[str, Any], recipe: object, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """A program's arguments with the file of its custom recipe in the recipe's place, if it has
    one."""
    file = ScriptFile.of(recipe, arguments) if "recipe" in kwargs else None
    return {**kwargs, "recipe": file} if file else kwargs


_running: list[str] = []
"""The files that are being run."""
_files: set[str] = set()
"""The modules that are such files."""
_run: list[ModuleType] = []
"""The modules of all files that have been run."""


def refuse_in_file(what: str) -> None:
    """Raise `UserError` while a file is run for its functions, on a worker or for a command."""
    if _running:
        raise UserError(
            f"{what}: each worker runs {_running[-1]}.py, too, for its function; put this under "
            '`if __name__ == "__main__":`'
        )


def module_at(what: str, place: str) -> ModuleType:
    """The module of `path/to/file.py`, which is run, or of a dotted name, which is imported.

    Raises `UserError`, which begins with `what`.
    """
    with user_code_errors(what, is_all_theirs=True):
        if place.endswith(".py"):
            return run_file(Path(place))
        try:
            return importlib.import_module(place)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{place}.".startswith(f"{error.name}."):
                raise
            raise UserError(f"{what}: there is no module {place}") from None


def run_file(file: Path) -> ModuleType:
    """Run a file under its own name, with its folder on the path and its command-line arguments."""
    module = _module(file.stem, file)
    spec = module.__spec__
    assert spec is not None
    # Dataclasses look up their module in sys.modules, and `torch.save` of a whole model its class.
    before = sys.modules.get(spec.name)
    sys.modules[spec.name] = module
    # Reader processes cannot import it by its name.
    cloudpickle.register_pickle_by_value(module)
    _run.append(module)
    try:
        run_again(module)
    finally:
        if before is None:
            _files.add(spec.name)
        elif spec.name not in _files:
            sys.modules[spec.name] = before
    return module


def run_as_main(file: Path) -> None:
    """Run a file as `python FILE` does, each time in a new module."""
    run_again(_module("__main__", file))


def _module(name: str, file: Path) -> ModuleType:
    """An empty module for the file, with its folder on the path."""
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None, f"{file} does not end in .py"
    if (folder := str(file.resolve().parent)) not in sys.path:
        sys.path.insert(0, folder)
    return importlib.util.module_from_spec(spec)


def module_of(function: object) -> ModuleType | None:
    """The module of a function, if it is a file that has been run here."""
    values = getattr(function, "__globals__", None)
    return next((module for module in _run if vars(module) is values), None)


def run_again(module: ModuleType) -> None:
    """Run a file in its module as it is now."""
    spec = module.__spec__
    assert spec is not None and spec.loader is not None, f"{module.__name__} has no file"
    _running.append(spec.name)
    try:
        with _arguments(_arguments_of(str(spec.origin))):
            spec.loader.exec_module(module)
    finally:
        _running.pop()


@contextmanager
def _arguments(words: list[str]) -> Iterator[None]:
    before, sys.argv = sys.argv, words
    try:
        yield
    finally:
        sys.argv = before


def _arguments_of(file: str) -> list[str]:
    """The command line of a file: that of this process, if it is the file's."""
    is_this_program = bool(sys.argv) and Path(sys.argv[0]).resolve() == Path(file).resolve()
    return sys.argv if is_this_program else [file]


def _sources_beside(file: Path) -> dict[str, str]:
    paths = {file}
    for module in list(sys.modules.values()):
        name = getattr(module, "__file__", None)
        if name and name.endswith(".py") and is_users(name):
            path = Path(name).resolve()
            if path.is_relative_to(file.parent):
                paths.add(path)
    texts = {str(path.relative_to(file.parent)): _text_of(path) for path in sorted(paths)}
    return {name: text for name, text in texts.items() if text is not None}


def _text_of(path: Path) -> str | None:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return None
