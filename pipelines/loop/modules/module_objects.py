"""What modules refer to: which objects are the script's alone, and which hold parts of a model."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from functools import partial
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import nn

from actors.distributed.torch_private import MODULE_TABLES
from pipelines.loop.modules.model_views import OWN_PREFIX

MODE = "training"
_OF_TORCH = vars(nn.Module())
BOOKKEEPING = _OF_TORCH.keys() - {MODE}
"""The attributes in which torch keeps what a module has."""
HOOK_TABLES = sorted(
    name
    for name, value in _OF_TORCH.items()
    if isinstance(value, dict) and name not in MODULE_TABLES
)
HOOK_FLAGS = sorted(name for name in BOOKKEEPING if isinstance(_OF_TORCH[name], bool | None))
"""What torch notes about the hooks besides."""
WITHOUT_PARTS = (
    bool, int, float, complex, str, bytes, bytearray, type, type(None), range, slice,
    FunctionType, BuiltinFunctionType, CodeType, ModuleType, torch.dtype, torch.device,
)  # fmt: skip
"""Types of objects that `deepcopy` does not copy."""


def is_attribute(name: str) -> bool:
    """Whether this is an attribute of the module's class or script, or the module's mode."""
    return name not in BOOKKEEPING and not name.startswith(OWN_PREFIX)


def tensors_and_parts(module: nn.Module) -> Iterator[tuple[str, str, Any]]:
    """The parameters, buffers and children of a module: table, name and value."""
    for table in sorted(MODULE_TABLES):
        for name, value in vars(module).get(table, {}).items():
            if value is not None:
                yield table, name, value


class ScriptObjects(NamedTuple):
    """Objects by id, without modules of a model and their tensors."""

    alone: dict[int, Any]
    """Those that do not lead to a part of the model."""
    holding: dict[int, Any]
    """Those that do."""


def objects_of(modules: Iterable[nn.Module], models: Iterable[nn.Module]) -> ScriptObjects:
    """The objects to which modules refer.

    `models` are other objects that count as these modules.
    """
    modules = list(modules)
    own = {id(item) for item in (*modules, *models)}
    own.update(id(value) for module in modules for *_, value in tensors_and_parts(module))
    return objects_in((value for module in modules for value in _other_values(module)), own)


def objects_in(values: Iterable[Any], own: set[int]) -> ScriptObjects:
    """The objects of which values consist; `own` are the ids of a model's parts."""
    alone: dict[int, Any] = {}
    holding: dict[int, Any] = {}
    referrers: dict[int, list[int]] = {}
    waiting = [value for value in values if not isinstance(value, WITHOUT_PARTS)]
    while waiting:
        item = waiting.pop()
        if id(item) in alone or id(item) in own:
            continue
        alone[id(item)] = item
        for part in _parts_of(item):
            if not isinstance(part, WITHOUT_PARTS):
                referrers.setdefault(id(part), []).append(id(item))
                waiting.append(part)
    leading = deque(own)
    while leading:
        for referrer in referrers.pop(leading.popleft(), ()):
            if referrer in alone:
                holding[referrer] = alone.pop(referrer)
            leading.append(referrer)
    return ScriptObjects(alone, holding)


def _other_values(module: nn.Module) -> Iterator[Any]:
    """What a module has besides its tensors and children: attributes, and what its hooks call."""
    for name, value in vars(module).items():
        if name in HOOK_TABLES:
            yield from value.values()
        elif is_attribute(name):
            yield value


def _parts_of(item: Any) -> Iterator[Any]:
    """What `deepcopy` would copy with an object."""
    if isinstance(item, dict):
        yield from item.keys()
        yield from item.values()
    elif isinstance(item, list | tuple | set | frozenset | deque):
        yield from item
    elif isinstance(item, MethodType):
        yield item.__self__
    elif isinstance(item, partial):
        yield from (item.func, item.args, item.keywords)
    yield from getattr(item, "__dict__", {}).values()
    for kind in type(item).__mro__:
        slots = vars(kind).get("__slots__", ())
        for slot in (slots,) if isinstance(slots, str) else tuple(slots):
            if not slot.startswith("__") and hasattr(item, slot):
                yield getattr(item, slot)
