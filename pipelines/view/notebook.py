"""One output of a notebook's cell, drawn anew as a terminal's panel is; it needs no widgets."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from rich.console import RenderableType


class Cell:
    """Stands where `rich.live.Live` does on a terminal; IPython is there wherever notebooks are."""

    def __init__(self) -> None:
        self._display: Any = import_module("IPython.display").display
        self._shown: Any = None

    def start(self) -> None:
        """The first update makes the output."""

    def stop(self) -> None:
        """The last one stays."""

    def update(self, renderable: RenderableType, *, refresh: bool) -> None:
        if self._shown is None:
            self._shown = self._display(renderable, display_id=True)
        else:
            self._shown.update(renderable)
