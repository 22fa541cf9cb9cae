"""A recipe for making an object in another process, which is sent as plain values only, and fast
imports there."""

from __future__ import annotations

import gc
import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Factory:
    """How to make an object in another process: `module:callable` and its keyword arguments.

    `environment` is set there before the module is imported.
    """

    target: str
    kwargs: dict[str, Any] = field(repr=False)
    """Not in the repr: there may be secrets among them."""
    environment: dict[str, str] = field(default_factory=dict)

    def make(self) -> Any:
        os.environ.update(self.environment)
        module, _, name = self.target.partition(":")
        with quick_imports():
            imported = importlib.import_module(module)
        return getattr(imported, name)(**self.kwargs)


@contextmanager
def quick_imports() -> Iterator[None]:
    """Pause garbage collection inside the block.

    Imports create a million objects and hardly any garbage: collections would take a quarter of the
    time of importing torch.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
