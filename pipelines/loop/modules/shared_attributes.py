"""Modes, hooks and attributes of a script's model, the same on a worker's part of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import deepcopy
from operator import is_
from types import MethodType
from typing import Any

from torch import Tensor, nn

from pipelines.loop.modules.bound_functions import bound_to
from pipelines.loop.modules.model_views import OWN_PREFIX, plain
from pipelines.loop.modules.module_objects import (
    HOOK_FLAGS,
    HOOK_TABLES,
    MODE,
    is_attribute,
    objects_in,
    tensors_and_parts,
)

SHARED = f"{OWN_PREFIX}_shared"
"""The attribute of a part that keeps it the same as the script's model."""
SCALARS = (bool, int, float, str, type(None))
_ABSENT = object()
_Attributes = dict[str, Any]


class SharedAttributes:
    """Keeps a script's model and a worker's part of it the same in all that is no tensor.

    What the script changes in its model, the part gets: modes, attributes and hooks. Numbers and
    texts that a forward pass changes in the part, the model gets. Tensors and modules are the
    run's.
    """

    def __init__(self, model: nn.Module, part: nn.Module) -> None:
        copies = dict(part.named_modules())
        self._pairs = [
            _Pair(name, module, copies[name]) for name, module in _named(model) if name in copies
        ]
        self._model = model
        self._objects: list[_Pair] = []
        """Objects that hold parts of the model, and their copies."""
        self.changed_texts: list[str] = []
        """The names of texts that the script has changed in its model."""
        vars(part)[SHARED] = self

    @staticmethod
    def of(model: nn.Module, part: nn.Module) -> SharedAttributes:
        """Those of a part, and of the model that the script has now.

        A script that has been restarted has another model than the one that was copied.
        """
        known = vars(part).get(SHARED)
        if not isinstance(known, SharedAttributes):
            return SharedAttributes(model, part)
        if known._model is not model:
            modules = dict(_named(model))
            for pair in known._pairs:
                if (module := modules.get(pair.name)) is not None:
                    pair.module = module
            known._model, known._objects = model, []
        return known

    def add(self, objects: Iterable[Any], copies: Mapping[int, Any]) -> None:
        """Keep these objects and their copies the same, too."""
        for item in objects:
            has_attributes = hasattr(item, "__dict__") and not isinstance(item, Tensor | MethodType)
            if has_attributes and (copy := copies.get(id(item))) is not None:
                self._objects.append(_Pair("", item, copy))

    def begin(self) -> None:
        """Give the part all that the script has changed in its model."""
        for pair in self._pairs:
            pair.note_replaced()
        self.push()
        for pair in self._pairs:
            if pair.has_other_hooks():
                pair.push_hooks(self._copied)

    def push(self) -> None:
        """Give the part the attributes and modes that the script has changed in its model."""
        for pair in [*self._pairs, *self._objects]:
            if pair.is_changed():
                self.changed_texts += pair.push(self._copied)

    def pull(self) -> None:
        """Give the model the numbers and texts that have changed in the part."""
        for pair in [*self._pairs, *self._objects]:
            pair.pull()

    def _copied(self, value: Any) -> Any:
        """The part's counterpart of an object: the object itself unless it holds parts of the
        model."""
        memo: dict[int, Any] = {}
        for pair in self._pairs:
            memo[id(pair.module)] = pair.copy
            for table, name, tensor in tensors_and_parts(pair.module):
                memo.setdefault(id(tensor), vars(pair.copy).get(table, {}).get(name))
        if (bound := bound_to(value, memo)) is not value:
            return bound
        objects = objects_in([value], set(memo))
        memo |= objects.alone | {id(pair.module): pair.copy for pair in self._objects}
        copied = deepcopy(value, memo)
        known = {id(pair.module) for pair in self._objects}
        self.add((item for key, item in objects.holding.items() if key not in known), memo)
        return copied


class _Pair:
    """A module of the script's model, or an object that holds one, and its copy, with what both had
    when they were the same."""

    def __init__(self, name: str, module: Any, copy: Any) -> None:
        self.name = name
        self.module, self.copy = module, copy
        self._seen = vars(module).copy()
        self._copied: _Attributes | None = vars(copy).copy()
        """What the copy had at first, until it is used."""
        self._scalars = _scalars(vars(copy))
        self._pulled = [*vars(copy).values()]
        """The values of the copy that were looked at last."""
        self._hooks = {table: _hooks(module, table) for table in HOOK_TABLES}
        self._has_hooks = any(self._hooks.values())
        self._replaced: set[str] = set()
        """The attributes that the run has replaced since it made the copy, such as `forward`."""

    def note_replaced(self) -> None:
        copied, self._copied = self._copied, None
        if copied is not None:
            self._replaced = {
                name
                for name, value in vars(self.copy).items()
                if is_attribute(name)
                and name != MODE
                and not _alike(value, copied.get(name, _ABSENT))
            }

    def is_changed(self) -> bool:
        now = vars(self.module)
        return len(now) != len(self._seen) or not all(map(is_, now.values(), self._seen.values()))

    def push(self, copied: Any) -> list[str]:
        """Returns the names of texts that have changed."""
        seen, self._seen, texts = self._seen, vars(self.module).copy(), []
        copy = vars(self.copy)
        for name in self._seen.keys() | seen.keys():
            new, old = self._seen.get(name, _ABSENT), seen.get(name, _ABSENT)
            if not is_attribute(name) or name in self._replaced or _alike(new, old):
                continue
            if new is _ABSENT:
                copy.pop(name, None)
                continue
            copy[name] = new if isinstance(new, SCALARS) else copied(new)
            if isinstance(new, str):
                texts.append(f"{self.name}.{name}".lstrip("."))
        self._scalars, self._pulled = _scalars(copy), [*copy.values()]
        return texts

    def pull(self) -> None:
        """Take from the copy what a pass has changed; tensors are not even looked at."""
        now = vars(self.copy)
        if len(now) == len(self._pulled) and all(map(is_, now.values(), self._pulled)):
            return
        self._pulled = [*now.values()]
        seen, self._scalars = self._scalars, _scalars(now)
        if seen == self._scalars:
            return
        module = vars(self.module)
        for name, value in self._scalars.items():
            is_shared = is_attribute(name) and name not in self._replaced
            if is_shared and not _alike(value, seen.get(name, _ABSENT)):
                module[name] = self._seen[name] = value

    def has_other_hooks(self) -> bool:
        now = vars(self.module)
        if not self._has_hooks and not any(map(now.get, HOOK_TABLES)):
            return False
        return any(_hooks(self.module, table) != keys for table, keys in self._hooks.items())

    def push_hooks(self, copied: Any) -> None:
        """Replace the script's hooks in the copy, and leave those of the run in their places."""
        module, copy = vars(self.module), vars(self.copy)
        for table, known in self._hooks.items():
            if known == _hooks(self.module, table):
                continue
            hooks = {key: copied(hook) for key, hook in module[table].items()}
            others = {key: hook for key, hook in copy[table].items() if key not in known}
            is_first = [key in known for key in copy[table]]
            num_before = is_first.index(True) if True in is_first else len(others)
            items = [*others.items()]
            copy[table].clear()
            copy[table].update([*items[:num_before], *hooks.items(), *items[num_before:]])
        copy.update({flag: module[flag] for flag in HOOK_FLAGS if flag in module})
        self._hooks = {table: _hooks(self.module, table) for table in HOOK_TABLES}
        self._has_hooks = any(self._hooks.values())


def _named(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The modules of a model by name, whether it is prepared or not."""
    view = plain(model)
    return [(name, model if part is view else part) for name, part in view.named_modules()]


def _hooks(module: Any, table: str) -> list[Any]:
    return [*vars(module).get(table, ())]


def _scalars(attributes: _Attributes) -> _Attributes:
    return {name: value for name, value in attributes.items() if type(value) in SCALARS}


def _alike(value: Any, other: Any) -> bool:
    """Whether these are one object, or equal numbers or texts of one type."""
    if value is other:
        return True
    is_scalar = type(value) is type(other) and isinstance(value, SCALARS)
    return is_scalar and (value == other or (value != value and other != other))
