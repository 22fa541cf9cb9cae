"""A recipe for making an object in another process, which is sent as plain values only."""

from __future__ import annotations

import importlib
import os
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
        return getattr(importlib.import_module(module), name)(**self.kwargs)
