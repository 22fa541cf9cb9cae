"""Private names of a library stand in one file, those of torch in two, with the reasons."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_imports import FILES, PACKAGES, ROOT, name_of, parse

from actors.distributed import torch_names
from actors.distributed.torch_names import (
    ALTERNATIVES,
    MODULE_NAMES,
    NAMES,
    OPTIMIZER_NAMES,
    PROVEN,
    missing_names,
    refuse_unknown_torch,
)
from actors.storage.errors import UnsuitableMachine

WRAPPERS = {
    "torch": ROOT / "actors/distributed/torch_private.py",
    "torch.distributed": ROOT / "actors/distributed/backends/torch_groups_private.py",
    "ray": ROOT / "actors/ray_backend/cluster/ray_private.py",
    "transformers": ROOT / "pipelines/hugging_face/transformers_private.py",
}
STANDARD_LIBRARY = {"_asdict", "_current_frames", "_exit", "_fields", "_replace"}
"""Documented names of the standard library that begin with an underscore."""
INTERNAL = ("ray.core", "ray.dashboard", "torch.distributed.distributed_c10d")
"""Modules without an underscore that are private all the same."""
PRIVATE = re.compile(r"_[a-zA-Z]\w*")


def is_private(name: str) -> bool:
    return bool(PRIVATE.fullmatch(name)) and name not in STANDARD_LIBRARY


def own_names(trees: list[ast.Module]) -> set[str]:
    """The private attributes that the classes of the project define."""
    names = set()
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.ClassDef):
            for part in node.body:
                if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef):
                    names.add(part.name)
                elif isinstance(part, ast.Assign | ast.AnnAssign):
                    targets = part.targets if isinstance(part, ast.Assign) else [part.target]
                    names |= {target.id for target in targets if isinstance(target, ast.Name)}
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and _is_own(node.value)
        ):
            names.add(node.attr)
    return names


def _is_own(value: ast.expr) -> bool:
    """Whether an expression is `self`, `cls` or `super()`."""
    value = value.func if isinstance(value, ast.Call) else value
    return isinstance(value, ast.Name) and value.id in ("self", "cls", "super")


def private_uses(tree: ast.Module, own: set[str]) -> Iterator[tuple[int, str]]:
    """Line and name of each use of a private name of other code.

    A private attribute is the project's if a class of the same file defines it, or if it is used
    through `self`, `cls` or `super()` and any class defines it.
    """
    local = own_names([tree])
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if _is_private_module(alias.name):
                    yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if _is_private_module(f"{node.module}.{alias.name}"):
                    yield node.lineno, f"{node.module}.{alias.name}"
        elif isinstance(node, ast.Attribute) and is_private(node.attr):
            known = own | local if _is_own(node.value) else local
            if node.attr not in known:
                yield node.lineno, node.attr
        elif isinstance(node, ast.Call):
            yield from (use for use in _named_by_string(node) if use[1] not in local)


def _is_private_module(name: str) -> bool:
    is_internal = any(name == module or name.startswith(f"{module}.") for module in INTERNAL)
    parts = name.split(".")
    return is_internal or (parts[0] != "__future__" and any(map(is_private, parts)))


def _named_by_string(call: ast.Call) -> Iterator[tuple[int, str]]:
    """A private name as a string: `getattr(model, "_tp_plan")`, `import_module("torch._C")`."""
    function = call.func.attr if isinstance(call.func, ast.Attribute) else None
    function = call.func.id if isinstance(call.func, ast.Name) else function
    if function not in ("getattr", "setattr", "hasattr", "delattr", "import_module"):
        return
    for argument in call.args:
        name = argument.value if isinstance(argument, ast.Constant) else None
        if isinstance(name, str) and _is_private_module(name):
            yield call.lineno, name


OWN = own_names([parse(path) for path in FILES])


@pytest.mark.parametrize(
    "path", [path for path in FILES if path not in WRAPPERS.values()], ids=name_of
)
def test_private_names_of_libraries_are_used_in_one_file_each(path: Path) -> None:
    uses = [f"line {line}: {name}" for line, name in private_uses(parse(path), OWN)]
    assert not uses, f"put it into one of {[name_of(file) for file in WRAPPERS.values()]}: {uses}"


@pytest.mark.parametrize("library", WRAPPERS)
def test_each_wrapper_uses_private_names_and_gives_reasons(library: str) -> None:
    tree = parse(WRAPPERS[library])
    assert list(private_uses(tree, OWN))
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    without = [
        function.name
        for function in functions
        if not ast.get_docstring(function) and not function.name.startswith("_")
    ]
    assert functions and not without


def optional_names(tree: ast.Module) -> Iterator[str]:
    """Names whose absence the wrapper allows for: `getattr(module, "name", None)`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and len(node.args) == 3:
            yield from (name for _, name in _named_by_string(node))


def required_names(library: str) -> set[str]:
    tree = parse(WRAPPERS[library])
    names = {part for _, use in private_uses(tree, OWN) for part in use.split(".")}
    return {name for name in names if is_private(name)} - set(optional_names(tree))


CHECKED = {part for owner in NAMES for part in owner.split(".")}
CHECKED |= {part for row in ALTERNATIVES for path in row for part in path.split(".")}
CHECKED |= {name for names in (*NAMES.values(), MODULE_NAMES, OPTIMIZER_NAMES) for name in names}
FALLBACKS = {
    "_clear_sharding_prop_cache",  # if the fast path is missing
    "_fsdp_param_group",  # if `_fsdp_param_groups` is missing
    "_dump_fr_trace_json",
    "_dump_nccl_trace_json",
}


@pytest.mark.parametrize("library", ["torch", "torch.distributed"])
def test_each_private_name_of_torch_is_checked_at_start(library: str) -> None:
    assert required_names(library) - FALLBACKS <= CHECKED


def test_the_installed_torch_has_all_private_names() -> None:
    assert missing_names() == []


def test_the_pinned_torch_is_proven() -> None:
    [pinned] = re.findall(r"^torch==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned in PROVEN


def test_a_torch_without_a_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(NAMES, "torch._gone", ("first", "second"))
    monkeypatch.setitem(NAMES, "torch.distributed.ProcessGroup", ("_dissolve",))
    monkeypatch.setattr(torch_names, "MODULE_NAMES", ("_weights",))
    monkeypatch.setattr(
        torch_names, "ALTERNATIVES", (("torch.a", "torch.b"), ("torch.a", "torch.nn"))
    )
    with pytest.raises(UnsuitableMachine) as refused:
        refuse_unknown_torch()
    gone = "torch._gone.first, torch._gone.second, torch.a or torch.b, torch.nn.Module()._weights"
    assert "has no torch.distributed.ProcessGroup._dissolve, " + gone in str(refused.value)
    assert f"install torch=={PROVEN[-1]}" in str(refused.value)


@pytest.mark.parametrize(
    "code",
    [
        "import ray._private.worker",
        "from ray._private import state",
        "from ray.core.generated import autoscaler_pb2",
        "from torch.utils._pytree import tree_leaves",
        "from torch.distributed.tensor import _op_schema",
        "import torch\ntorch._foreach_mul_([], 1.0)",
        "def of(module):\n    return module._parameters",
        "class Mine(Module):\n    def table(self):\n        return self._parameters",
        "class Mine(Module):\n    def table(self):\n        return super()._parameters",
        "plan = getattr(model, '_tp_plan', None)",
        "import_module('torch._C')",
    ],
)
def test_each_way_to_use_a_private_name_is_found(code: str) -> None:
    assert list(private_uses(ast.parse(code), OWN))


@pytest.mark.parametrize(
    "code",
    [
        "from __future__ import annotations",
        "class Mine:\n    def __init__(self):\n        self._own_table = {}",
        "class Mine:\n    def _ends(self):\n        return 1\n\ndef of(mine):\n    mine._ends()",
        "place = place._replace(name='x')",
        "version = torch.__version__",
    ],
)
def test_other_names_are_allowed(code: str) -> None:
    assert not list(private_uses(ast.parse(code), OWN))


def test_the_wrappers_lie_in_the_packages() -> None:
    assert {name_of(path).partition("/")[0] for path in WRAPPERS.values()} <= set(PACKAGES)
