"""The structure of the source: which folder may import which, and limits on sizes."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("elastic", "actors", "pipelines")
FILES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
LATE_IMPORTS = ROOT / "pipelines" / "cli.py"
"""The only file that may import inside functions, so that `elastic status` answers at once."""
TEST_FILES = sorted((ROOT / "tests").rglob("*.py"))
MAY_IMPORT = {
    "elastic": {"elastic"},
    "actors": {"actors", "elastic"},
    "pipelines": {"pipelines", "actors", "elastic"},
}
ONLY_IN = {"ray": ("actors",), "mlflow": ("pipelines",)}
PUBLIC_RAY = ("ray.train", "ray.data")
"""`pipelines/` may use value classes of these in its public interfaces."""
LEVELS: dict[str, tuple[tuple[str, ...], ...]] = {
    "elastic": (
        (".",),
        ("replay",),
        ("controller",),
        ("controller/capacity",),
        ("duties",),
        ("protocol",),
        ("simulation",),
        ("planner", "reshard"),
        ("planner/models", "planner/market"),
        ("geometry",),
    ),
    "actors": (
        (".",),
        ("ray_backend", "local", "simulation"),
        ("ray_backend/cluster", "controller"),
        ("worker",),
        ("health",),
        ("snapshots", "distributed"),
        ("distributed/backends",),
        ("host_memory", "notices", "runtime"),
        ("storage",),
    ),
    "pipelines": (
        (".",),
        ("api", "doctor", "migration", "plan", "simulation"),
        ("run",),
        ("observe/sidecar",),
        ("observe/tracking",),
        ("hugging_face/weights",),
        ("observe/view", "hugging_face", "loop", "callbacks"),
        ("loop/prepared", "hugging_face/routing"),
        ("loop/state",),
        ("loop/modules",),
        ("observe/history", "training"),
        ("observe", "training/replica"),
        ("training/custom",),
        ("training/custom/modules",),
        ("training/passes", "training/checkpoint"),
        ("training/sharding",),
        ("training/models",),
        ("training/attention",),
        ("training/tensor",),
        ("training/workload",),
        ("custom_data",),
        ("custom_data/sample_shards",),
        ("data", "reading"),
        ("data/cache",),
        ("settings",),
        ("errors.py",),
    ),
}
"""The folders of each package by level, from the top: each imports only folders on lower levels,
so folders on one level do not import each other. A file of the package's own folder may have a
level apart from it."""
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_FOLDER_FILES = 15


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), filename=str(path))


def imported_names(node: ast.AST) -> list[str]:
    """The full names that one statement imports."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        assert node.level == 0, "a relative import"
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return []


def imports_of(tree: ast.AST) -> list[str]:
    return [name for node in ast.walk(tree) for name in imported_names(node)]


def find_modules() -> dict[str, Path]:
    """Each file of the packages by its dotted name."""
    names = {path.relative_to(ROOT).with_suffix("").as_posix(): path for path in FILES}
    return {name.removesuffix("/__init__").replace("/", "."): path for name, path in names.items()}


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_packages_import_in_one_direction(path: Path) -> None:
    package = path.relative_to(ROOT).parts[0]
    for name in imports_of(parse(path)):
        top = name.partition(".")[0]
        assert top not in PACKAGES or top in MAY_IMPORT[package], f"{package} imports {name}"
        if package == "elastic":
            assert top == "elastic" or top in sys.stdlib_module_names, f"elastic imports {name}"
        allowed = package in ONLY_IN.get(top, (package,)) or name.startswith(PUBLIC_RAY)
        assert allowed, f"{package} imports {name}"


def level_of(path: Path) -> tuple[str, int]:
    """The package of a file, and the level of its folder, counted from the top."""
    package, *_ = path.relative_to(ROOT).parts
    room = room_of(path.relative_to(ROOT / package), package)
    [level] = [number for number, rooms in enumerate(LEVELS[package]) if room in rooms]
    return package, level


def room_of(path: Path, package: str) -> str:
    """What LEVELS lists of a file: itself, or its folder."""
    is_listed = any(path.as_posix() in rooms for rooms in LEVELS[package])
    return (path if is_listed else path.parent).as_posix()


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_folders_import_only_lower_levels(path: Path) -> None:
    package, level = level_of(path)
    known = find_modules()
    for name in _depends_on(path, known):
        imported_path = known[name]
        if level_of(imported_path)[0] == package and not share_room(path, imported_path):
            assert level_of(imported_path)[1] > level, f"{name} is not on a lower level"


def share_room(path: Path, other: Path) -> bool:
    return path.parent == other.parent and level_of(path) == level_of(other)


@pytest.mark.parametrize("package", PACKAGES)
def test_each_folder_has_one_level_and_at_most_15_files(package: str) -> None:
    files = [
        path.relative_to(ROOT / package) for path in FILES if path.is_relative_to(ROOT / package)
    ]
    counts = Counter(room_of(file, package) for file in files)
    listed_folders = [folder for level in LEVELS[package] for folder in level]
    assert sorted(listed_folders) == sorted(counts)
    assert {folder for folder, number in counts.items() if number > MAX_FOLDER_FILES} == set()


def test_class_names_are_unique() -> None:
    classes = Counter(
        node.name for path in FILES for node in parse(path).body if isinstance(node, ast.ClassDef)
    )
    assert not [name for name, number in classes.items() if number > 1]


@pytest.mark.parametrize("path", [path for path in FILES if path != LATE_IMPORTS], ids=name_of)
def test_imports_are_at_the_top_of_a_file(path: Path) -> None:
    tree = parse(path)
    nested = [node for node in ast.walk(tree) if imported_names(node) and node not in tree.body]
    assert not nested, f"line {nested[0].lineno}: a nested import"
    assert "TYPE_CHECKING" not in path.read_text()


def test_core_has_no_clock_randomness_or_environment() -> None:
    forbidden = {"time", "random", "os", "logging", "threading", "datetime", "asyncio", "uuid"}
    for path in FILES:
        if path.is_relative_to(ROOT / "elastic"):
            tops = {name.partition(".")[0] for name in imports_of(parse(path))}
            assert not tops & forbidden, f"{name_of(path)} imports {tops & forbidden}"


def test_no_import_cycles() -> None:
    known = find_modules()
    graph = {name: sorted(_depends_on(path, known)) for name, path in known.items()}
    finished: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, " -> ".join((*trail[trail.index(name) :], name))
        if name not in finished:
            for other in graph[name]:
                visit(other, (*trail, name))
            finished.add(name)

    for name in graph:
        visit(name, ())
    assert len(finished) > 50


@pytest.mark.parametrize(
    "start",
    [
        "actors.ray_backend.controller",
        "actors.ray_backend.worker",
        "pipelines.observe.sidecar.sidecar",
    ],
)
def test_controller_agent_and_observer_import_no_torch(start: str) -> None:
    """Importing torch would cost each of these processes 3 s at its start and 200 MB."""
    known = find_modules()
    visited, pending = set(), [start]
    while pending:
        name = pending.pop()
        if name not in visited:
            visited.add(name)
            tops = {other.partition(".")[0] for other in imports_of(parse(known[name]))}
            assert "torch" not in tops, f"{start} imports {name}, which imports torch"
            packages = [name.rpartition(".")[0]] if "." in name else []
            pending += [*_depends_on(known[name], known), *(p for p in packages if p in known)]
    assert len(visited) > 20


STATUS_AND_LOGS = "pipelines.cli, pipelines.observe.view.status, pipelines.observe.view.logs"
HEAVY = {"torch", "ray", "mlflow", "transformers", "matplotlib"}


@pytest.mark.parametrize(
    ("modules", "late"),
    [
        (STATUS_AND_LOGS, HEAVY),
        ("pipelines.cli", HEAVY | {"pydantic", "elastic.controller.core"}),
        ("pipelines.run.refusals, pipelines.settings.overrides", HEAVY),
        ("actors.worker.trainer", {"elastic.controller.core"}),
    ],
    ids=["status and logs", "help", "refusals", "worker"],
)
def test_process_imports_only_what_it_needs(modules: str, late: set[str]) -> None:
    """`elastic --help`, `status`, `logs` and most refusals come at once; workers start fast."""
    program = f"import sys, {modules}\nprint(sorted({late} & set(sys.modules)))"
    finished = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    assert finished.stdout == "[]\n"


def _depends_on(path: Path, known: dict[str, Path]) -> Iterator[str]:
    for name in imports_of(parse(path)):
        module = name if name in known else name.rpartition(".")[0]
        if module in known:
            yield module


@pytest.mark.parametrize("path", [*FILES, *TEST_FILES], ids=name_of)
def test_files_and_functions_are_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= MAX_FILE_LINES
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            num_lines = (node.end_lineno or node.lineno) - node.lineno + 1
            assert num_lines <= MAX_FUNCTION_LINES, f"{node.name} has {num_lines} lines"
