"""How an object is made in another process, of which only plain values travel there."""

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
    """Not shown where this is: there may be secrets among them."""
    environment: dict[str, str] = field(default_factory=dict)

    def make(self) -> Any:
        os.environ.update(self.environment)
        module, _, name = self.target.partition(":")
        return getattr(importlib.import_module(module), name)(**self.kwargs)
